"""Log lines about requests that fail for one cause: some, not one for each request of a storm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class QuietLog:
    """Passes on a few lines a second; of the others it says how many there were.

    Args:
        logger: where lines go.
        max_lines: in any one period.
        period_s: of counting.
        now: seconds of any clock that does not go back.
    """

    def __init__(
        self,
        logger: logging.Logger,
        max_lines: int = 5,
        period_s: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._max_lines = max_lines
        self._period_s = period_s
        self._now = now
        self._began_s = now()
        self._num_lines = 0

    def warning(self, line: str) -> None:
        """Log one line, unless there were too many; then the next one that passes counts them."""
        now = self._now()
        if now - self._began_s >= self._period_s:
            num_dropped = self._num_lines - self._max_lines
            if num_dropped > 0:
                line = f"{line} (and {num_dropped} more lines like it)"
            self._began_s, self._num_lines = now, 0
        self._num_lines += 1
        if self._num_lines <= self._max_lines:
            self._logger.warning("%s", line)
