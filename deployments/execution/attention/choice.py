"""Which attention backend runs a model's layers: the configured one, or the best that can.

Knows the backends by name and nothing of how they attend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deployments.config import ExecutionConfig
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.cpu_native import DTYPES, CpuNativeAttention
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.kv_cache import LayerSpec
from deployments.execution.load_gate import UnsupportedModel
from deployments.execution.native.compiler import CannotCompile

logger = logging.getLogger(__name__)


def choose_backend(
    execution: ExecutionConfig,
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    kernel_cache: Path,
) -> AttentionBackend[Any]:
    """The configured attention backend; auto takes cpu_native where it can be had, else cpu_sdpa.

    Args:
        kernel_cache: where compiled kernels are kept.

    Raises:
        UnsupportedModel: the configured one cannot be had, or cannot run one of the layers.
    """
    backend: AttentionBackend[Any]
    if execution.attention_backend == "reference":
        backend = ReferenceAttention()
    elif execution.attention_backend == "cpu_native":
        backend = _native(execution, dtype, device, kernel_cache)
    elif execution.attention_backend == "auto":
        backend = _native_or_sdpa(execution, dtype, device, kernel_cache)
    else:
        backend = CpuSdpaAttention(dtype, device)
    for spec in specs:
        if not backend.supports(spec):
            raise UnsupportedModel(f"attention backend {backend.name!r} cannot run {spec}")
    return backend


def _why_not_native(
    execution: ExecutionConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What speaks against the compiled kernel, before a compiler is looked for; None: nothing."""
    if device.type != "cpu":
        return f"it runs on a CPU, and the model is on {device}"
    if dtype not in DTYPES:
        return f"it computes float32 and bfloat16, and the model is {dtype}"
    if not execution.compile_kernels:
        return "execution.compile_kernels is off"
    return None


def _native(
    execution: ExecutionConfig, dtype: torch.dtype, device: torch.device, kernel_cache: Path
) -> CpuNativeAttention:
    why = _why_not_native(execution, dtype, device)
    try:
        if why is None:
            return CpuNativeAttention.compiled(kernel_cache, dtype)
    except (CannotCompile, OSError) as error:
        why = str(error)
    raise UnsupportedModel(
        f"execution.attention_backend is cpu_native, which cannot be had: {why}; "
        "change that, or set the backend to auto"
    )


def _native_or_sdpa(
    execution: ExecutionConfig, dtype: torch.dtype, device: torch.device, kernel_cache: Path
) -> AttentionBackend[Any]:
    if _why_not_native(execution, dtype, device) is None:
        try:
            return CpuNativeAttention.compiled(kernel_cache, dtype)
        except (CannotCompile, OSError) as error:
            logger.warning("attention goes through torch, which is slower: %s", error)
    return CpuSdpaAttention(dtype, device)
