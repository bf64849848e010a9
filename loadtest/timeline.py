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
MAX_UNCOUNTED = 256
"""Records that wait to be counted together: numpy's calls cost more than what they count."""

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
        self._uncounted: list[RequestRecord] = []

    def add(self, record: RequestRecord) -> None:
        """Take in a request that has ended."""
        self._uncounted.append(record)
        if len(self._uncounted) == MAX_UNCOUNTED:
            self._count()

    def counts(self) -> TimelineCounts:
        """All bins so far."""
        self._count()
        return TimelineCounts(
            self._bin_s,
            *(
                bins.counts[: self._num_bins].tolist()
                for bins in (self._arrived, self._ended, self._failed, self._tokens)
            ),
        )

    def _count(self) -> None:
        records, self._uncounted = self._uncounted, []
        if not records:
            return
        self._cover(max([record.end_s for record in records]))
        for bins, times_s in (
            (self._arrived, [record.intended_s for record in records]),
            (self._ended, [record.end_s for record in records]),
            (self._failed, [record.end_s for record in records if record.error is not None]),
            (self._tokens, np.concatenate([np.asarray(r.token_times_s, float) for r in records])),
        ):
            bins.count(self._places(times_s))

    def _cover(self, time_s: float) -> None:
        while (place := int(max(0.0, time_s - self._start_s) / self._bin_s)) >= MAX_BINS:
            self._bin_s *= 2
            self._num_bins = -(-self._num_bins // 2)
            for bins in (self._arrived, self._ended, self._failed, self._tokens):
                bins.halve()
        self._num_bins = max(self._num_bins, place + 1)

    def _places(self, times_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
        since_start_s = np.maximum(np.asarray(times_s, float) - self._start_s, 0.0)
        return np.minimum((since_start_s / self._bin_s).astype(np.int64), self._num_bins - 1)


class _Bins:
    """The counts of one kind of event."""

    def __init__(self) -> None:
        self.counts: _Counts = np.zeros(MAX_BINS, dtype=np.int64)

    def count(self, places: npt.NDArray[np.int64]) -> None:
        self.counts += np.bincount(places, minlength=MAX_BINS)

    def halve(self) -> None:
        halved = self.counts[0::2] + self.counts[1::2]
        self.counts = np.concatenate([halved, np.zeros(MAX_BINS - len(halved), dtype=np.int64)])
