"""Arrivals made anew, ticks spread, times scaled."""

from __future__ import annotations

import statistics

import pytest

from loadtest.arrivals import (
    arriving_at,
    ramping_up,
    scale_times,
    spread_ticks,
    within,
)
from loadtest.send_times import RampStrategy, RampUp
from loadtest.trace import TraceError, TraceRequest


def requests_at(*times_s: float) -> list[TraceRequest]:
    return [TraceRequest(time_s, 10 + place, 5) for place, time_s in enumerate(times_s)]


def test_new_arrivals_keep_the_order_and_the_lengths() -> None:
    """Requests change places, or keep the times they had."""
    old = requests_at(*[0.0] * 500)
    new = arriving_at(old, rate=10.0, seed=4)
    assert [each.input_length for each in new] == [each.input_length for each in old]
    assert new[-1].timestamp_s == pytest.approx(50.0)
    assert arriving_at(old, rate=10.0, seed=4) == new != arriving_at(old, rate=10.0, seed=5)


def test_a_ramp_sends_more_at_its_end() -> None:
    """A ramp-up is as steady as no ramp-up."""
    new = ramping_up(requests_at(*[0.0] * 1000), RampUp(RampStrategy.LINEAR, 1.0, 20.0), seed=1)
    half_s = new[-1].timestamp_s / 2
    assert sum(each.timestamp_s < half_s for each in new) < 350


def test_ticks_are_spread_over_their_length() -> None:
    """All of a tick is sent at one instant, or moves into another tick, or anew each time."""
    old = requests_at(*[0.0] * 200, *[3.0] * 200)
    new = spread_ticks(old, seed=2)
    assert new == sorted(new, key=lambda each: each.timestamp_s)
    places = [each.timestamp_s for each in new]
    assert all(time_s < 3.0 for time_s in places[:200])
    assert all(3.0 <= time_s < 6.0 for time_s in places[200:])
    assert statistics.fmean(places[:200]) == pytest.approx(1.5, abs=0.2)
    assert {each.input_length for each in new[:200]} == {each.input_length for each in old[:200]}
    assert spread_ticks(old, seed=2) == new


def test_half_the_time_is_twice_the_rate() -> None:
    """The factor is taken for a speed."""
    assert [each.timestamp_s for each in scale_times(requests_at(0, 4), 0.5)] == [0.0, 2.0]


def test_a_stretch_starts_at_zero() -> None:
    """A stretch of a trace waits for its start, or takes the request at its end."""
    stretch = within(requests_at(0, 5, 6, 9), 5, 9)
    assert [(each.timestamp_s, each.input_length) for each in stretch] == [(0.0, 11), (1.0, 12)]
    with pytest.raises(TraceError, match="no request from 20 s to 30 s"):
        within(requests_at(0, 5), 20, 30)
    for start_s, end_s in ((5, 5), (float("nan"), 9), (0, float("nan"))):
        with pytest.raises(TraceError, match="give a later end"):
            within(requests_at(0, 5), start_s, end_s)


@pytest.mark.parametrize("scale", [scale_times, spread_ticks])
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_bad_factor_is_told(scale: object, factor: float) -> None:
    """A factor of 0 sends all at once, one of NaN nothing at any time."""
    with pytest.raises(TraceError, match="must be a number above 0"):
        scale(requests_at(0, 1), factor)  # type: ignore[operator]
