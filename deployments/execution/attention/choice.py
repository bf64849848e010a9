"""Which attention backend runs a model's layers: the configured one, or the best that can.

Knows the backends by name and nothing of how they attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deployments.config import ExecutionConfig
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.kv_cache import LayerSpec
from deployments.execution.load_gate import UnsupportedModel


def choose_backend(
    execution: ExecutionConfig,
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend[Any]:
    """The configured attention backend; auto takes cpu_sdpa.

    Raises:
        UnsupportedModel: it cannot run one of the layers.
    """
    backend: AttentionBackend[Any]
    if execution.attention_backend == "reference":
        backend = ReferenceAttention()
    else:
        backend = CpuSdpaAttention(dtype, device)
    for spec in specs:
        if not backend.supports(spec):
            raise UnsupportedModel(f"attention backend {backend.name!r} cannot run {spec}")
    return backend
