"""What a computation was seen to do: calls over numbered places of tensors. Data alone.

place     0         1          2 (constant)   3             4
stands    input     input      a weight       new_empty     a view of 3
calls     new_empty(0) -> 3    view(3) -> 4   rms_norm into (0, 2, 3)   ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deployments.execution.native.kernel import Kernel

NOBODY = -1
"""The place of a tensor that is not there, as native/tape.cpp has it."""


@dataclass(frozen=True, slots=True)
class Places:
    """An argument of an operation that is a tensor, or a list of tensors."""

    places: tuple[int, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class SeenOperation:
    """An operation of torch."""

    function: Any
    arguments: dict[int, Any]
    """By index, those that were given; a tensor's is a Places."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    has_effect: bool
    """It changes memory that was there before."""


@dataclass(frozen=True, slots=True)
class SeenKernel:
    """A call of one of our own kernels, which writes to memory that others made."""

    kernel: Kernel
    reads: tuple[int, ...]
    offsets: tuple[int, ...]
    """Bytes from where the tensor of a place begins."""
    sizes: tuple[int, ...]
    numbers: tuple[float, ...]
    writes: tuple[int, ...] = ()
    has_effect: bool = True


@dataclass(slots=True)
class Script:
    """Calls in order.

    Args:
        num_inputs: they stand in the first places.
    """

    num_inputs: int
    num_places: int = 0
    constants: dict[int, Tensor] = field(default_factory=dict)
    calls: list[SeenOperation | SeenKernel] = field(default_factory=list)
    result: int = NOBODY

    def prune(self) -> None:
        """Take out what nobody asks for: views that only kernels were given, above all."""
        needed = {self.result}
        kept: list[SeenOperation | SeenKernel] = []
        for call in reversed(self.calls):
            if call.has_effect or not needed.isdisjoint(call.writes):
                needed.update(call.reads)
                kept.append(call)
        self.calls = kept[::-1]
        self.constants = {at: tensor for at, tensor in self.constants.items() if at in needed}

    def find_unused(self) -> list[list[int]]:
        """For each call the places that nobody reads after it."""
        later = {self.result, NOBODY, *range(self.num_inputs), *self.constants}
        unused = []
        for call in reversed(self.calls):
            last = {*call.reads, *call.writes} - later
            later |= last
            unused.append(sorted(last))
        return unused[::-1]
