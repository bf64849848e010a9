"""The highest request rate that a system sustains under its SLO, by bisection.

The system is a function from a rate to a `Trial`: the HTTP client and the simulator use the same
search. Knows neither of them, nor what the SLO is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MAX_MEDIAN_DELAY_S = 2.0
"""Sustained-queue test of Sarathi-Serve (OSDI'24, section 5): beyond it the queue grows for as long
as the load lasts, and any latency that was measured only tells how long that was."""


class CapacityError(ValueError):
    """Bounds that no search can start from; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a load of one rate came to.

    Args:
        rate: requests per second that were offered.
        meets_slo: whether the latencies kept the SLO.
        median_scheduling_delay_s: from arrival to the first step that computes a request.
    """

    rate: float
    meets_slo: bool
    median_scheduling_delay_s: float

    @property
    def is_sustained(self) -> bool:
        """Whether the system can go on so: the SLO is met and the queue does not grow."""
        return self.meets_slo and self.median_scheduling_delay_s <= MAX_MEDIAN_DELAY_S


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """Where to look.

    Args:
        start: the first rate that is tried, requests per second.
        lowest: a system that cannot do this has no capacity.
        highest: nothing above it is tried.
        tolerance: how far apart, relatively, the two rates are that the capacity lies between.
    """

    start: float = 1.0
    lowest: float = 0.01
    highest: float = 100_000.0
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.lowest <= self.start <= self.highest < math.inf:
            raise CapacityError(
                f"a search needs 0 < lowest <= start <= highest, not {self.lowest:g}, "
                f"{self.start:g}, {self.highest:g}"
            )
        if not self.tolerance > 0.0:
            raise CapacityError(f"the tolerance must be above 0, not {self.tolerance:g}")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the search found.

    Args:
        rate: the highest rate that was tried and sustained; 0 if none was.
        failed_rate: the lowest one above it that was not; None if none failed.
        trials: all of them, in the order they were run.
    """

    rate: float
    failed_rate: float | None
    trials: tuple[Trial, ...]


def find_capacity(outcome_at: Callable[[float], Trial], bounds: SearchBounds) -> Capacity:
    """Double or halve the rate until one is sustained and one is not, then bisect between them.

    Takes it that what is sustained at a rate is sustained at any lower one; noise near the capacity
    moves the result within it.

    Args:
        outcome_at: runs a load of this rate. What it raises ends the search.
        bounds: where to look, and how closely.
    """
    trials: list[Trial] = []

    def is_sustained(rate: float) -> bool:
        trials.append(outcome_at(rate))
        return trials[-1].is_sustained

    good, bad = _bracket(is_sustained, bounds)
    while good is not None and bad is not None and bad / good > 1.0 + bounds.tolerance:
        middle = math.sqrt(good * bad)
        if is_sustained(middle):
            good = middle
        else:
            bad = middle
    return Capacity(good or 0.0, bad, tuple(trials))


def _bracket(
    is_sustained: Callable[[float], bool], bounds: SearchBounds
) -> tuple[float | None, float | None]:
    """A rate that is sustained and a higher one that is not; None where the bounds have none."""
    rate = bounds.start
    if is_sustained(rate):
        while rate < bounds.highest:
            good, rate = rate, min(rate * 2.0, bounds.highest)
            if not is_sustained(rate):
                return good, rate
        return rate, None
    while rate > bounds.lowest:
        bad, rate = rate, max(rate / 2.0, bounds.lowest)
        if is_sustained(rate):
            return rate, bad
    return None, rate
