"""One compiled function and how it is called; who is recording is told of each call.

All kernels have the signature of `native/arguments.h`: tensors, sizes, numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


@runtime_checkable
class KernelListener(Protocol):
    """A dispatch mode that wants to know of kernels too, which torch does not dispatch."""

    def heard(
        self,
        kernel: Kernel,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float],
    ) -> None:
        """The kernel was called, and has returned."""
        ...


class Kernel:
    """A function of a compiled library.

    Args:
        library: loaded; it stays so.
        name: of the function.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        function = library[name]
        function.argtypes = [ctypes.c_void_p] * 3
        function.restype = ctypes.c_int
        self._function = function
        self.name = name

    @property
    def address(self) -> int:
        """Where the function begins."""
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        return address

    def __call__(
        self,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        """Run it, on the calling thread and those it starts.

        Args:
            tensors: as the kernel lists them; their memory is read and written in place.

        Raises:
            MemoryError: it found no memory for its sums.
        """
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        is_out_of_memory = self._function(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_double * len(numbers))(*numbers),
        )
        if is_out_of_memory:
            raise MemoryError(f"{self.name} found no memory for its sums")
        mode = _get_current_dispatch_mode()
        if isinstance(mode, KernelListener):
            mode.heard(self, tensors, sizes, numbers)
