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
