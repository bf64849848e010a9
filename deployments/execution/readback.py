"""Small device tensors on the way to the host: the copy begins at once, and the host waits for it
alone, and only when it needs what it holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the order of a device's work, as `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


class Readback:
    """A tensor that is copied to the host.

    Args:
        here: host memory, whole once `mark` is reached.
        mark: None: it is whole already.
    """

    def __init__(self, here: Tensor, mark: Mark | None) -> None:
        self._here = here
        self._mark = mark

    def wait(self) -> Any:
        """The values as nested lists; waits for the device where the copy is still under way."""
        if self._mark is not None:
            self._mark.synchronize()
        return self._here.tolist()


def read_back(tensor: Tensor) -> Readback:
    """Begin to copy a tensor to the host, in the order of the current stream.

    From a GPU into pinned memory, since a copy into any other would make the host wait.
    """
    if tensor.device.type != "cuda":
        return Readback(tensor, None)
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(tensor.device))
    return Readback(here, mark)
