"""The load that is offered is the one that was asked for."""

from __future__ import annotations

import math
import statistics

import pytest

from loadtest.send_times import RampStrategy, RampUp, SendTimesError, ramped_times, steady_times


def gaps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *times_s], times_s, strict=False)]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_the_offered_rate_is_exact_and_the_gaps_as_bursty_as_asked(burstiness: float) -> None:
    """The seed changes how much load a run offers, or burstiness changes nothing."""
    times_s = list(steady_times(4000, rate=8.0, burstiness=burstiness, seed=3))
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(500.0)
    # The coefficient of variation of a gamma distribution is 1/sqrt(shape).
    variation = statistics.pstdev(gaps(times_s)) / statistics.fmean(gaps(times_s))
    assert variation == pytest.approx(1.0 / math.sqrt(burstiness), abs=0.1)


def test_the_seed_alone_makes_the_times() -> None:
    """A run cannot be repeated, or every run has the same arrivals."""
    assert list(steady_times(9, 2.0, seed=1)) == list(steady_times(9, 2.0, seed=1))
    assert list(steady_times(9, 2.0, seed=1)) != list(steady_times(9, 2.0, seed=2))


def test_an_infinite_rate_sends_all_at_once() -> None:
    """An infinite rate divides by zero."""
    assert list(steady_times(3, math.inf)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", 10**0.5)])
def test_a_ramp_goes_from_its_start_to_its_end(strategy: str, middle: float) -> None:
    """The rate within a ramp is not that of its strategy."""
    ramp_up = RampUp(RampStrategy(strategy), 1.0, 10.0)
    found = gaps(list(ramped_times(101, ramp_up, burstiness=math.inf)))
    assert [1.0 / found[index] for index in (0, 50, 100)] == pytest.approx([1.0, middle, 10.0])


def test_rates_and_burstiness_of_zero_are_refused() -> None:
    """A run hangs or divides by zero."""
    for rate, burstiness in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(SendTimesError, match="above 0"):
            steady_times(3, rate, burstiness)
    with pytest.raises(SendTimesError):
        RampUp(RampStrategy.LINEAR, 0.0, 1.0)
