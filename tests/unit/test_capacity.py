"""The search finds where a system stops keeping up, and asks no more often than it must."""

from __future__ import annotations

import pytest

from loadtest.capacity import (
    MAX_MEDIAN_DELAY_S,
    Capacity,
    CapacityError,
    SearchBounds,
    Trial,
    find_capacity,
)


def search(capacity: float, **bounds: float) -> Capacity:
    return find_capacity(lambda rate: Trial(rate, rate <= capacity, 0.0), SearchBounds(**bounds))


@pytest.mark.parametrize("capacity", [0.02, 0.7, 1.0, 3.3, 900.0])
def test_the_capacity_lies_between_the_two_rates(capacity: float) -> None:
    """A rate that fails passes for the capacity, or one far below it."""
    found = search(capacity, tolerance=0.02)
    assert found.failed_rate is not None
    assert found.rate <= capacity < found.failed_rate <= found.rate * 1.02
    assert len(found.trials) <= 20


def test_a_growing_queue_is_not_sustained_though_the_slo_is_met() -> None:
    """A short run at too high a rate passes, because its queue had no time to hurt."""
    delays = {1.0: 0.0, 2.0: MAX_MEDIAN_DELAY_S, 4.0: MAX_MEDIAN_DELAY_S + 0.1}
    found = find_capacity(lambda rate: Trial(rate, True, delays[rate]), SearchBounds(tolerance=1.5))
    assert (found.rate, found.failed_rate) == (2.0, 4.0)


def test_bounds_end_the_search() -> None:
    """A system without a limit, or without any capacity, is searched forever."""
    assert search(1e9, highest=100.0) == search(100.0, highest=100.0)
    assert (search(1e9, highest=100.0).rate, search(1e9, highest=100.0).failed_rate) == (
        100.0,
        None,
    )
    nothing = search(0.0, lowest=0.3)
    assert (nothing.rate, nothing.failed_rate) == (0.0, 0.3)


def test_impossible_bounds_are_refused() -> None:
    """A search starts outside of its bounds, or never ends."""
    for bounds in ({"start": 0.0}, {"start": 5.0, "highest": 4.0}, {"tolerance": 0.0}):
        with pytest.raises(CapacityError):
            SearchBounds(**bounds)
