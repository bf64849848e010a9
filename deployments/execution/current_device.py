"""Which of several GPUs a thread means where nothing names one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current one meanwhile: kernels of Triton, and much of torch.cuda,
    run on the current one wherever their tensors lie. Does nothing for other devices.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
