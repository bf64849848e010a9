"""Tells a device that is out of memory from other failures of a step, however torch words it."""

from __future__ import annotations

import gc

import torch

_WORDINGS = (
    "DefaultCPUAllocator",
    "_STATUS_ALLOC_FAILED",  # of CUDA's libraries
    "CUDA error: out of memory",  # of its runtime, as where a graph is made ready to run
    "[CUDA]: out of memory",  # of Triton
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host where it is the device, has no memory left; also where
    another error came over that one, as the end of a recording that failed raises its own.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDINGS):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def release_unused(device: torch.device) -> None:
    """Give back what the allocator keeps for later; call it once the failed step's error is gone,
    since its frames hold the step's tensors.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
