"""Ends a run as soon as it cannot keep its SLO any more, whatever its other requests see.

Of n values at most so many may exceed a bound if a percentile of them is to keep it; how many
values there will be is known from the trace. So most runs of a search, those of fleets that are too
small, end early. Owns that count; the verdict on runs that go to their end is the planner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.measures import RequestRecord, Slo
from loadtest.trace import TraceRequest


class SloLost(Exception):
    """The run cannot keep its SLO any more."""


@dataclass(slots=True)
class _Bound:
    """One bound of the SLO; `num_spare` values more may exceed it."""

    bound_s: float
    num_spare: int
    values_of: Callable[[RequestRecord], Iterable[float | None]]


class SloGuard:
    """Watches the requests of one run.

    Args:
        trace: what is served.
        slo: bounds that `percentile` percent have to keep.
        percentile: of requests; of gaps for the bound on gaps.
    """

    def __init__(self, trace: Sequence[TraceRequest], slo: Slo, percentile: float) -> None:
        num_with_gaps = sum([traced.output_length > 1 for traced in trace])
        num_gaps = sum([max(0, traced.output_length - 1) for traced in trace])
        candidates: list[tuple[float | None, int, Callable[..., Iterable[float | None]]]] = [
            (slo.ttft_s, len(trace), lambda record: (record.ttft_s,)),
            (slo.tpot_s, num_with_gaps, lambda record: (record.tpot_s,)),
            (slo.itl_s, num_gaps, lambda record: record.gaps_s()),
            (slo.e2e_s, len(trace), lambda record: (record.e2e_s,)),
        ]
        self._bounds = [
            _Bound(bound_s, num_may_exceed(num_values, percentile), values_of)
            for bound_s, num_values, values_of in candidates
            if bound_s is not None
        ]

    def take(self, record: RequestRecord) -> None:
        """A request has ended.

        Raises:
            SloLost: with it, more values exceed a bound than may.
        """
        for bound in self._bounds:
            for value_s in bound.values_of(record):
                bound.num_spare -= value_s is not None and value_s > bound.bound_s
            if bound.num_spare < 0:
                raise SloLost


def num_may_exceed(num_values: int, percentile: float) -> int:
    """How many of so many values may exceed a bound that their percentile keeps, if it is linear
    between neighbours as in numpy.
    """
    if num_values == 0:
        return 0
    return num_values - 1 - math.floor((num_values - 1) * percentile / 100)
