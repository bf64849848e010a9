"""Which attention backend runs a model's layers: the configured one, or the best that can.

Knows the backends by name and what each needs to be there; nothing of how they attend.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

PREFERRED = {"cpu": ("cpu_native", "cpu_sdpa"), "cuda": ("triton", "cpu_sdpa")}
"""What auto tries on a kind of device, the fastest first; the last runs everywhere."""


class CannotBeHad(RuntimeError):
    """A backend does not run here; the message says why."""


class IsNotForThis(CannotBeHad):
    """It was never meant to run such a model on such a device with such settings."""


@dataclass(frozen=True, slots=True)
class Layers:
    """What a backend is to run, and where."""

    execution: ExecutionConfig
    specs: Sequence[LayerSpec]
    dtype: torch.dtype
    device: torch.device
    kernel_cache: Path


def choose_backend(
    execution: ExecutionConfig,
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    kernel_cache: Path,
) -> AttentionBackend[Any]:
    """The configured attention backend; auto takes the first of PREFERRED that can be had.

    Args:
        kernel_cache: where compiled kernels are kept.

    Raises:
        UnsupportedModel: the configured one cannot be had, or cannot run one of the layers.
    """
    layers = Layers(execution, specs, dtype, device, kernel_cache)
    name = execution.attention_backend
    if name == "auto":
        return _first_to_be_had(PREFERRED[device.type], layers)
    try:
        return _make(name, layers)
    except CannotBeHad as error:
        raise UnsupportedModel(
            f"execution.attention_backend is {name}, which cannot be had: {error}; change that, or "
            "set the backend to auto"
        ) from error


def _first_to_be_had(names: Sequence[str], layers: Layers) -> AttentionBackend[Any]:
    *better, last = names
    for name in better:
        try:
            return _make(name, layers)
        except IsNotForThis:
            continue
        except CannotBeHad as error:
            logger.warning("attention goes without %s, which is faster: %s", name, error)
    return _make(last, layers)


def _make(name: str, layers: Layers) -> AttentionBackend[Any]:
    backend = _MAKERS[name](layers)
    for spec in layers.specs:
        if not backend.supports(spec):
            raise IsNotForThis(f"it cannot run {spec}")
    return backend


def _reference(layers: Layers) -> AttentionBackend[Any]:
    return ReferenceAttention()


def _sdpa(layers: Layers) -> AttentionBackend[Any]:
    return CpuSdpaAttention(layers.dtype, layers.device)


def _native(layers: Layers) -> AttentionBackend[Any]:
    if layers.device.type != "cpu":
        raise IsNotForThis(f"it runs on a CPU, and the model is on {layers.device}")
    if layers.dtype not in DTYPES:
        raise IsNotForThis(f"it computes float32 and bfloat16, and the model is {layers.dtype}")
    if not layers.execution.compile_kernels:
        raise IsNotForThis("execution.compile_kernels is off")
    try:
        return CpuNativeAttention.compiled(layers.kernel_cache, layers.dtype)
    except (CannotCompile, OSError) as error:
        raise CannotBeHad(str(error)) from error


def _triton(layers: Layers) -> AttentionBackend[Any]:
    if importlib.util.find_spec("triton") is None:
        raise CannotBeHad("it needs the package triton, which torch's CUDA builds bring along")
    if layers.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise IsNotForThis(f"it runs on a GPU, and the model is on {layers.device}")
    # Imported here: a machine without a GPU may lack it, and pays half a second for it.
    from deployments.execution.attention.triton_backend import TritonAttention

    return TritonAttention(layers.specs, layers.dtype, layers.device)


_MAKERS: dict[str, Callable[[Layers], AttentionBackend[Any]]] = {
    "reference": _reference,
    "cpu_sdpa": _sdpa,
    "cpu_native": _native,
    "triton": _triton,
}
