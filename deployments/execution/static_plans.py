"""What a backend offers whose plans of decode steps can stand in fixed memory, as CUDA graphs need
them. No arithmetic here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class StaticShape:
    """What a fixed plan has room for.

    Args:
        num_rows: decodes, those of nobody included.
        kind: of the plans that will be copied into it.
        num_blocks: of the longest request.
        block_size: tokens of a block.
    """

    num_rows: int
    kind: int
    num_blocks: int
    block_size: int


@runtime_checkable
class StaticPlans(Protocol):
    """Plans of decode steps that can be copied into fixed ones."""

    def plan_kind(self, plan: Any) -> int:
        """Plans of one kind and size may replay one recording."""
        ...

    def plan_kinds(self, shape: StaticShape) -> Sequence[int]:
        """All kinds that plans of as many decodes may be of, as long as that shape allows; its own
        kind does not matter.
        """
        ...

    def make_static(self, shape: StaticShape) -> Any:
        """A plan of that kind for so many decodes, each of the null block."""
        ...

    def fill_static(self, static: Any, plan: Any) -> None:
        """Copy a plan into one made for its kind and number of rows, on the device."""
        ...
