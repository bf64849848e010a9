"""Many values in bounded memory: exact while they are few, to a quarter of a percent afterwards.

Owns the counts and their quantiles; what the values mean is the caller's. Values are seconds or
counts: the buckets reach from a billionth to a billion.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

MAX_EXACT_VALUES = 100_000
BUCKET_WIDTH = 0.005
"""Of a bucket, relative to its lower end."""

_LEAST = 1e-9
_GREATEST = 1e9
_LOG_WIDTH = math.log1p(BUCKET_WIDTH)
_NUM_BUCKETS = math.ceil(math.log(_GREATEST / _LEAST) / _LOG_WIDTH) + 1

_Counts = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]


class Distribution:
    """Values, their mean and their quantiles.

    Count, mean, standard deviation, least and greatest value stay exact. So are quantiles of up
    to `MAX_EXACT_VALUES` values; with more, they are those of logarithmic buckets `BUCKET_WIDTH`
    wide. Values of no more than a nanosecond share one bucket.
    """

    def __init__(self) -> None:
        # Those not yet in buckets, never more than MAX_EXACT_VALUES.
        self._values = array("d")
        self._counts: _Counts | None = None
        self._moments = _Moments()

    def add(self, value: float) -> None:
        """Take in one value.

        Raises:
            ValueError: it is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"only finite values have a distribution, not {value}")
        if len(self._values) == MAX_EXACT_VALUES:
            self._fold()
        self._values.append(value)

    def add_many(self, values: Iterable[float]) -> None:
        """Take in several; for many at once faster than `add`.

        Raises:
            ValueError: one is not finite; none was taken in.
        """
        fresh = array("d", values)
        if not np.isfinite(np.array(fresh)).all():
            raise ValueError("only finite values have a distribution")
        taken = 0
        while taken < len(fresh):
            if len(self._values) == MAX_EXACT_VALUES:
                self._fold()
            room = MAX_EXACT_VALUES - len(self._values)
            self._values.extend(fresh[taken : taken + room])
            taken += room

    @classmethod
    def merged(cls, parts: Iterable[Distribution]) -> Distribution:
        """A new one of all their values; the parts stay as they are, whatever happens to it."""
        whole = cls()
        for part in parts:
            if part._counts is not None:
                whole._fold()
                whole._counts = part._counts + whole._folded_counts()
                whole._moments = whole._moments.joined(part._moments)
            whole.add_many(part._values)
        if whole._counts is not None:
            whole._fold()
        return whole

    @property
    def count(self) -> int:
        """How many values there are."""
        return self._moments.count + len(self._values)

    @property
    def is_exact(self) -> bool:
        """Whether quantiles are exact."""
        return self._counts is None

    @property
    def mean(self) -> float:
        """Their mean.

        Raises:
            ValueError: there are no values.
        """
        return self._all_moments().mean

    @property
    def std(self) -> float:
        """Their standard deviation, of the values as the whole population.

        Raises:
            ValueError: there are no values.
        """
        moments = self._all_moments()
        return math.sqrt(max(moments.squares / moments.count, 0.0))

    @property
    def least(self) -> float:
        """The least value.

        Raises:
            ValueError: there are no values.
        """
        return self._all_moments().least

    @property
    def greatest(self) -> float:
        """The greatest value.

        Raises:
            ValueError: there are no values.
        """
        return self._all_moments().greatest

    def percentile(self, percent: float) -> float:
        """The value below which `percent` of them lie, linear between neighbours as in numpy.

        Raises:
            ValueError: there are no values, or `percent` is not within 0 and 100.
        """
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Several of them; all for the price of one.

        Raises:
            ValueError: there are no values, or one of `percents` is not within 0 and 100.
        """
        wanted = np.asarray(percents, dtype=np.float64)
        if not ((wanted >= 0) & (wanted <= 100)).all():
            raise ValueError(f"percentiles are within 0 and 100, not {percents}")
        moments = self._all_moments()
        if self._counts is None:
            return [float(value) for value in np.percentile(np.array(self._values), wanted)]
        values = self._values_at((moments.count - 1) * wanted / 100)
        # The ends are known exactly, and no value lies beyond them.
        values = np.clip(values, moments.least, moments.greatest)
        values[wanted == 0], values[wanted == 100] = moments.least, moments.greatest
        return [float(value) for value in values]

    def _values_at(self, ranks: _Values) -> _Values:
        """Those of the buckets; rank 0 is the least, between two ranks is between their values."""
        ends = np.cumsum(self._folded_counts())
        lower, upper = (
            _middles_of(np.searchsorted(ends, places, side="right"))
            for places in (np.floor(ranks), np.ceil(ranks))
        )
        values: _Values = lower + (upper - lower) * (ranks - np.floor(ranks))
        return values

    def _fold(self) -> None:
        self._counts = self._folded_counts()
        self._moments = self._moments.joined(_Moments.of(np.array(self._values)))
        del self._values[:]

    def _folded_counts(self) -> _Counts:
        counts = _counts_of(np.array(self._values))
        return counts if self._counts is None else counts + self._counts

    def _all_moments(self) -> _Moments:
        moments = self._moments.joined(_Moments.of(np.array(self._values)))
        if not moments.count:
            raise ValueError("no values, so no statistics of them")
        return moments


class _Moments:
    """Count, mean, sum of squared differences from it, least and greatest value."""

    def __init__(
        self,
        count: int = 0,
        mean: float = 0.0,
        squares: float = 0.0,
        least: float = math.inf,
        greatest: float = -math.inf,
    ) -> None:
        self.count = count
        self.mean = mean
        self.squares = squares
        self.least = least
        self.greatest = greatest

    @classmethod
    def of(cls, values: _Values) -> _Moments:
        """Those of some values."""
        if not len(values):
            return cls()
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        return cls(len(values), mean, squares, float(values.min()), float(values.max()))

    def joined(self, other: _Moments) -> _Moments:
        """Those of the values of both (Chan, Golub and LeVeque 1979, eq. 2.1)."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        shift = other.mean - self.mean
        return _Moments(
            count,
            self.mean + shift * other.count / count,
            self.squares + other.squares + shift * shift * self.count * other.count / count,
            min(self.least, other.least),
            max(self.greatest, other.greatest),
        )


def _counts_of(values: _Values) -> _Counts:
    places = np.log(np.clip(values, _LEAST, _GREATEST) / _LEAST) / _LOG_WIDTH
    counts = np.bincount(places.astype(np.int64), minlength=_NUM_BUCKETS)
    return counts.astype(np.int64, copy=False)


def _middles_of(buckets: npt.NDArray[np.intp]) -> _Values:
    """The values no more than half a bucket's width from any within them."""
    middles: _Values = _LEAST * np.exp((buckets + 0.5) * _LOG_WIDTH)
    return middles
