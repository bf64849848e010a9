"""How many tokens a step may hold: a rule passed to the scheduler, so that another rule is another
object.
"""

from __future__ import annotations

from typing import Protocol


class StepBudget(Protocol):
    """Decides the size of the next step."""

    def next_step(self, num_running: int) -> int:
        """Most tokens for a step that finds `num_running` requests running; at least 1."""
        ...


class FixedBudget:
    """The same budget for each step."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens

    def next_step(self, num_running: int) -> int:
        return self._max_num_batched_tokens


class ShrinkingBudget:
    """Another budget, and less of it for a while after a step did not fit the device's memory.

    Args:
        inner: the budget while there is memory.
        num_steps_to_grow: after so many steps that fitted, the bound doubles.
    """

    def __init__(self, inner: StepBudget, num_steps_to_grow: int = 64) -> None:
        self._inner = inner
        self._num_steps_to_grow = num_steps_to_grow
        self._bound: int | None = None
        self._num_steps_fitted = 0

    def next_step(self, num_running: int) -> int:
        wanted = self._inner.next_step(num_running)
        if self._bound is not None and self._bound >= wanted:
            self._bound = None
        return self._bound or wanted

    def shrink_below(self, num_tokens: int) -> None:
        """Half of `num_tokens`, which did not fit, is the most from now on; at least 1."""
        self._bound = max(1, num_tokens // 2)
        self._num_steps_fitted = 0

    def note_step_fitted(self) -> None:
        """Count a step that the device could hold, towards a larger bound."""
        if self._bound is None:
            return
        self._num_steps_fitted += 1
        if self._num_steps_fitted == self._num_steps_to_grow:
            self._bound *= 2
            self._num_steps_fitted = 0
