"""When the requests of a run came, ended and got their tokens, in a bounded number of equal bins.

bin     0      1      2      3        width doubles, and neighbours are added up,
        |------|------|------|-->     whenever a time lies beyond the last bin there may be
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadtest.records import RequestRecord

MAX_BINS = 600
FIRST_BIN_S = 0.25

_Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimelineCounts:
    """Counts of each bin; bin i is of times from i * bin_s on, in seconds from the run's start."""

    bin_s: float
    num_arrived: Sequence[int]
    num_ended: Sequence[int]
    num_failed: Sequence[int]
    num_output_tokens: Sequence[int]

    @property
    def max_open(self) -> int:
        """The most requests that were open at once, those that came and ended in a bin together."""
        before = [0, *self.num_open[:-1]]
        together = (num + came for num, came in zip(before, self.num_arrived, strict=False))
        return max(together, default=0)

    @property
    def num_open(self) -> list[int]:
        """Requests that had arrived and not ended, at the end of each bin."""
        difference = np.subtract(self.num_arrived, self.num_ended)
        return [int(count) for count in np.cumsum(difference)]


class Timeline:
    """Takes in the requests of a run one by one. Times before the start count as at the start.

    Args:
        start_s: of the run, on the clock of its records.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._start_s = start_s
        self._bin_s = FIRST_BIN_S
        self._num_bins = 0
        self._arrived = _Bins()
        self._ended = _Bins()
        self._failed = _Bins()
        self._tokens = _Bins()

    def add(self, record: RequestRecord) -> None:
        """Take in a request that has ended."""
        self._cover(record.end_s)
        self._arrived.count(self._places([record.intended_s]))
        self._ended.count(self._places([record.end_s]))
        if record.error is not None:
            self._failed.count(self._places([record.end_s]))
        if record.token_times_s:
            self._tokens.count(self._places(record.token_times_s))

    def counts(self) -> TimelineCounts:
        """All bins so far."""
        return TimelineCounts(
            self._bin_s,
            *(
                bins.counts[: self._num_bins].tolist()
                for bins in (self._arrived, self._ended, self._failed, self._tokens)
            ),
        )

    def _cover(self, time_s: float) -> None:
        while (place := int(max(0.0, time_s - self._start_s) / self._bin_s)) >= MAX_BINS:
            self._bin_s *= 2
            self._num_bins = -(-self._num_bins // 2)
            for bins in (self._arrived, self._ended, self._failed, self._tokens):
                bins.halve()
        self._num_bins = max(self._num_bins, place + 1)

    def _places(self, times_s: Sequence[float]) -> npt.NDArray[np.int64]:
        since_start_s = np.maximum(np.asarray(times_s) - self._start_s, 0.0)
        return np.minimum((since_start_s / self._bin_s).astype(np.int64), self._num_bins - 1)


class _Bins:
    """The counts of one kind of event."""

    def __init__(self) -> None:
        self.counts: _Counts = np.zeros(MAX_BINS, dtype=np.int64)

    def count(self, places: npt.NDArray[np.int64]) -> None:
        np.add.at(self.counts, places, 1)

    def halve(self) -> None:
        halved = self.counts[0::2] + self.counts[1::2]
        self.counts = np.concatenate([halved, np.zeros(MAX_BINS - len(halved), dtype=np.int64)])
