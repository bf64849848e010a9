"""Runs that end early because they cannot keep their SLO any more."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.measures import RequestRecord, Slo
from loadtest.slo_guard import SloGuard, SloLost, num_may_exceed
from loadtest.trace import TraceRequest


def record(*token_times_s: float) -> RequestRecord:
    return RequestRecord(0.0, 0.0, 8, token_times_s, end_s=token_times_s[-1])


@given(st.integers(1, 400), st.sampled_from([50.0, 90.0, 99.0, 99.9, 100.0]), st.data())
def test_so_many_may_exceed_and_no_more(num: int, percentile: float, data: st.DataObject) -> None:
    """A run ends early that would have kept its SLO, or goes on though it is lost."""
    num_spare = num_may_exceed(num, percentile)
    values = [1.0] * num
    for at in data.draw(st.permutations(range(num)))[: num_spare + 1]:
        values[at] = 2.0
    assert np.percentile(values, percentile) > 1.0
    values[values.index(2.0)] = 1.0
    # With one fewer it depends on how far they exceed it: the lower neighbour keeps the bound.
    assert np.percentile(values, percentile, method="lower") == 1.0


@pytest.mark.parametrize("bound", ["ttft:1000", "tpot:1000", "itl:1000", "e2el:2500"])
def test_a_run_ends_with_the_request_that_is_one_too_many(bound: str) -> None:
    """A bound is not watched, or one slow request of a hundred ends the run."""
    trace = [TraceRequest(0.0, 8, 2)] * 150  # the worst but one may keep the 99th percentile
    guard = SloGuard(trace, Slo.parse([bound]), 99.0)
    guard.take(record(2.0, 4.0))
    for _ in range(10):
        guard.take(record(0.5, 1.0))
    with pytest.raises(SloLost):
        guard.take(record(2.0, 4.0))
        guard.take(record(2.0, 4.0))


def test_what_is_not_asked_for_ends_no_run() -> None:
    """A slow end counts against a bound on first tokens."""
    guard = SloGuard([TraceRequest(0.0, 8, 2)] * 9, Slo.parse(["ttft:1000"]), 99.0)
    rng = random.Random(1)
    for _ in range(9):
        guard.take(record(0.9, 50.0 + rng.random()))
