"""Tells a device that is out of memory from other failures of a step, however torch words it."""

from __future__ import annotations

import gc

import torch

_OF_THE_CPU_ALLOCATOR = "DefaultCPUAllocator"
_OF_CUDA_LIBRARIES = "_STATUS_ALLOC_FAILED"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device, or the host where it is the device, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    named = _OF_THE_CPU_ALLOCATOR in message or _OF_CUDA_LIBRARIES in message
    return isinstance(error, RuntimeError) and named


def release_unused(device: torch.device) -> None:
    """Give back what the allocator keeps for later; call it once the failed step's error is gone,
    since its frames hold the step's tensors.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
