"""Values in bounded memory: what stays exact, and how far off the rest may be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.distribution import MAX_EXACT_VALUES, Distribution


def distribution_of(values: object) -> Distribution:
    filled = Distribution()
    filled.add_many(values)  # type: ignore[arg-type]
    return filled


def many_values() -> np.ndarray:
    return np.random.default_rng(7).lognormal(-3.0, 1.5, 3 * MAX_EXACT_VALUES + 11)


def test_quantiles_are_exact_up_to_the_limit() -> None:
    """Values are put into buckets before there are too many."""
    values = many_values()[:MAX_EXACT_VALUES]
    filled = distribution_of(values)
    assert filled.is_exact
    for percent in (0, 12.5, 50, 99, 99.9, 100):
        assert filled.percentile(percent) == np.percentile(values, percent)


def test_many_values_keep_exact_moments_and_close_quantiles() -> None:
    """Beyond the limit a quantile is off by more than half a bucket, or the mean drifts."""
    values = many_values()
    filled = distribution_of(values)
    assert not filled.is_exact
    assert filled.count == len(values)
    assert filled.mean == pytest.approx(values.mean(), rel=1e-12)
    assert filled.std == pytest.approx(values.std(), rel=1e-12)
    assert (filled.least, filled.greatest) == (values.min(), values.max())
    assert (filled.percentile(0), filled.percentile(100)) == (values.min(), values.max())
    for percent in (1, 25, 50, 90, 99, 99.9):
        exact = np.percentile(values, percent)
        assert filled.percentile(percent) == pytest.approx(exact, rel=0.0026)


@pytest.mark.parametrize("count", [1, 1000, MAX_EXACT_VALUES + 11])
def test_many_quantiles_at_once_are_those_one_by_one(count: int) -> None:
    """A curve that is read at once shows other latencies than the figures beside it."""
    filled = distribution_of(many_values()[:count])
    percents = [99.9, 0, 50, 100, 12.5]
    assert filled.percentiles(percents) == [filled.percentile(each) for each in percents]
    assert filled.percentiles([]) == []
    for bad in (-1.0, 100.5, math.nan):
        with pytest.raises(ValueError, match="within 0 and 100"):
            filled.percentiles([50, bad])


def test_memory_is_bounded() -> None:
    """A run of hours holds every value it ever saw."""
    filled = Distribution()
    for _ in range(5):
        filled.add_many([0.02] * MAX_EXACT_VALUES)
    assert len(filled._values) <= MAX_EXACT_VALUES
    assert filled.count == 5 * MAX_EXACT_VALUES


def test_one_by_one_is_as_many_at_once() -> None:
    """`add` and `add_many` fold at different counts, so that results depend on who fed them."""
    values = [0.001 * (1 + index % 977) for index in range(MAX_EXACT_VALUES + 5)]
    single, whole = Distribution(), distribution_of(values)
    for value in values:
        single.add(value)
    assert (single.count, single.is_exact) == (whole.count, whole.is_exact)
    assert single.percentile(73) == whole.percentile(73)


def test_zeros_and_negatives_have_quantiles() -> None:
    """A gap of nothing, or a request sent a moment early, breaks the logarithm."""
    filled = distribution_of([0.0] * MAX_EXACT_VALUES + [-1e-4, 1.0])
    assert filled.least == -1e-4
    assert filled.percentile(50) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize(
    ("num_first", "num_second"),
    [
        (10, 20),
        (0, 3),
        (MAX_EXACT_VALUES - 5, 20),
        (7, MAX_EXACT_VALUES + 5),
        (MAX_EXACT_VALUES + 5, 7),
    ],
)
def test_merging_is_as_if_one_had_seen_all(num_first: int, num_second: int) -> None:
    """Merged classes give other figures than the run as a whole, or change the parts."""
    values = many_values()
    parts = [values[:num_first], values[num_first : num_first + num_second]]
    merged = Distribution.merged(distribution_of(part) for part in parts)
    whole = distribution_of(values[: num_first + num_second])
    assert (merged.count, merged.is_exact) == (whole.count, whole.is_exact)
    assert merged.mean == pytest.approx(whole.mean, rel=1e-12)
    assert merged.percentile(99) == whole.percentile(99)


def test_merging_leaves_the_parts() -> None:
    """What is added to a merged one shows in its parts: a summary would change after the fact."""
    part = distribution_of(many_values())
    merged = Distribution.merged([part])
    before = part.percentile(50)
    merged.add_many([1e6] * (2 * MAX_EXACT_VALUES))
    assert part.percentile(50) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    """One bad value makes every figure NaN."""
    filled = Distribution()
    with pytest.raises(ValueError, match="finite"):
        filled.add(value)
    with pytest.raises(ValueError, match="finite"):
        filled.add_many([1.0, value])
    assert filled.count == 0


def test_nothing_has_no_statistics() -> None:
    """Where nothing was measured, a latency of 0 is told."""
    with pytest.raises(ValueError, match="no values"):
        Distribution().percentile(50)
    with pytest.raises(ValueError, match="no values"):
        _ = Distribution().mean
