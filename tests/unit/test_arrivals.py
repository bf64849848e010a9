"""Arrivals made anew, ticks spread, times and lengths scaled."""

from __future__ import annotations

import statistics

import pytest

from loadtest.arrivals import (
    arriving_at,
    ramping_up,
    scale_lengths,
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


def test_lengths_scale_and_stay_above_nothing() -> None:
    """A short answer becomes none."""
    assert scale_lengths([TraceRequest(0.0, 100, 1)], 0.25) == [TraceRequest(0.0, 25, 1)]


def shared_blocks(first: TraceRequest, second: TraceRequest) -> int:
    shared = 0
    for one, other in zip(first.hash_ids, second.hash_ids, strict=False):
        if one != other:
            break
        shared += 1
    return shared


@pytest.mark.parametrize(("factor", "shared"), [(0.5, 2), (0.25, 1), (1.0, 4), (2.0, 8), (1.5, 6)])
def test_what_prompts_share_scales_with_them(factor: float, shared: int) -> None:
    """A scaled trace has another hit rate: ids that stand for longer prompts than there are."""
    first = TraceRequest(0.0, 8 * 512, 5, (1, 2, 3, 4, 5, 6, 7, 8))
    second = TraceRequest(0.0, 8 * 512, 5, (1, 2, 3, 4, 15, 16, 17, 18))
    one, other = scale_lengths([first, second], factor)
    assert one.input_length == 8 * 512 * factor
    assert len(one.hash_ids) == 8 * factor
    assert shared_blocks(one, other) == shared
    assert len(set(one.hash_ids)) == len(one.hash_ids)


def test_a_last_partial_block_scales_with_its_prompt() -> None:
    """A prompt that ends within a block gets a block it has no tokens for."""
    (scaled,) = scale_lengths([TraceRequest(0.0, 700, 5, (1, 2))], 0.5)
    assert (scaled.input_length, len(scaled.hash_ids)) == (350, 1)


def test_a_stretch_starts_at_zero() -> None:
    """A stretch of a trace waits for its start, or takes the request at its end."""
    stretch = within(requests_at(0, 5, 6, 9), 5, 9)
    assert [(each.timestamp_s, each.input_length) for each in stretch] == [(0.0, 11), (1.0, 12)]
    with pytest.raises(TraceError, match="no request from 20 s to 30 s"):
        within(requests_at(0, 5), 20, 30)


@pytest.mark.parametrize("scale", [scale_times, scale_lengths, spread_ticks])
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_factor_is_told(scale: object, factor: float) -> None:
    """A factor of 0 sends all at once, one of NaN nothing at any time."""
    with pytest.raises(TraceError, match="must be a number above 0"):
        scale(requests_at(0, 1), factor)  # type: ignore[operator]
