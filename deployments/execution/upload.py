"""Small host arrays on the way to a device: many at once, by one copy that the host never waits
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 64
"""Of each array within the copy. A kernel is compiled anew for pointers of another alignment."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on a device, each in its own shape, by one copy.

        pinned host memory   [ first | pad | second | pad | third ]  ── one copy ──►  device

    The copy runs in the stream's order; torch keeps the host memory until it is done.

    Args:
        arrays: all of one dtype.
    """
    dtype = torch.from_numpy(arrays[0]).dtype
    alignment = _ALIGNMENT_BYTES // dtype.itemsize
    ends, end = [], 0
    for array in arrays:
        end = -(-end // alignment) * alignment + array.size
        ends.append(end)
    packed = torch.empty(end, dtype=dtype, pin_memory=device.type == "cuda")
    filled = packed.numpy()
    for array, stop in zip(arrays, ends, strict=True):
        filled[stop - array.size : stop] = array.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [
        there[stop - array.size : stop].view(array.shape)
        for array, stop in zip(arrays, ends, strict=True)
    ]
