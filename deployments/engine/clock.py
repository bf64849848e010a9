"""Time as an object: the one place of the engine that knows where time comes from."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to, for tests and for the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Let `duration_s` pass.

        Raises:
            ValueError: the duration is negative.
        """
        if duration_s < 0.0:
            raise ValueError(f"time does not go back: {duration_s}")
        self._now_s += duration_s

    def advance_to(self, moment_s: float) -> None:
        """Let time pass until `moment_s`; a moment that has passed is no matter."""
        self._now_s = max(self._now_s, moment_s)
