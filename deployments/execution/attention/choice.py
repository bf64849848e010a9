"""Which attention backend runs a model's layers: the configured one, or the best that can.

Knows the backends by name and nothing of how they attend.
"""

from __future__ import annotations

import importlib.util
import os
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
    """The configured attention backend; auto takes the fastest that can run all layers here: on a
    GPU triton, else cpu_sdpa.

    Raises:
        UnsupportedModel: the configured one cannot run here, or not one of the layers.
    """
    name = execution.attention_backend
    if name != "auto":
        backend = _make(name, specs, dtype, device)
        unsupported = next((spec for spec in specs if not backend.supports(spec)), None)
        if unsupported is not None:
            raise UnsupportedModel(f"attention backend {name!r} cannot run {unsupported}")
        return backend
    if device.type == "cuda" and _is_installed("triton"):
        backend = _make("triton", specs, dtype, device)
        if all(backend.supports(spec) for spec in specs):
            return backend
    return _make("cpu_sdpa", specs, dtype, device)


def _make(
    name: str, specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> AttentionBackend[Any]:
    if name == "triton":
        return _make_triton(specs, dtype, device)
    if name == "reference":
        return ReferenceAttention()
    return CpuSdpaAttention(dtype, device)


def _make_triton(
    specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> AttentionBackend[Any]:
    if not _is_installed("triton"):
        raise UnsupportedModel(
            "attention backend 'triton' needs the package triton, which torch's CUDA builds bring "
            "along; install it, or set execution.attention_backend to 'auto'"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedModel(
            "attention backend 'triton' needs a GPU; set execution.attention_backend to 'auto'"
        )
    # Imported here: a machine without a GPU may lack it, and pays half a second for it.
    from deployments.execution.attention.triton_backend import TritonAttention

    return TritonAttention(specs, dtype, device)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
