"""The search for the fewest replicas, over fleets whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.planning import PlanningError, Replicas, Setting, Trial, find_fewest, find_plan

SETTINGS = [Setting(budget, budget) for budget in (512, 1024, 2048, 4096)]


@given(
    st.lists(st.integers(1, 70), min_size=4, max_size=4),
    st.integers(1, 20),
    st.integers(20, 64),
    st.integers(1, 64),
)
def test_the_fewest_replicas_are_found(needs: list[int], least: int, most: int, start: int) -> None:
    """A setting that needs fewer is missed because it comes late, or a fleet too small is named."""
    start = max(least, min(start, most))
    needed = dict(zip(SETTINGS, needs, strict=True))

    def run(setting: Setting, num_replicas: int) -> Trial:
        assert least <= num_replicas <= most
        strain = needed[setting] / num_replicas
        return Trial(setting, num_replicas, num_replicas >= needed[setting], strain)

    plan = find_plan(run, SETTINGS, Replicas(least, most, start))
    fewest = max(least, min(needs))
    if fewest > most:
        assert plan.best is None
    else:
        assert plan.best is not None and plan.best.num_replicas == fewest
        # Of those that need no more, the one with the most to spare.
        assert needed[plan.best.setting] == min(needs)
    assert len({(trial.setting, trial.num_replicas) for trial in plan.trials}) == len(plan.trials)


def test_few_trials_are_enough() -> None:
    """Every number of replicas is simulated for every setting: a plan takes hours."""

    def run(setting: Setting, num_replicas: int) -> Trial:
        return Trial(setting, num_replicas, num_replicas >= 40, 40 / num_replicas)

    # From 32 up: 33, 35, 39, 47 is enough, 43, 41, 40; then each other setting with 40 and 39.
    assert len(find_plan(run, SETTINGS, Replicas(1, 128, 32)).trials) == 8 + 3 * 2


@given(st.integers(1, 200), st.integers(1, 60), st.integers(60, 128), st.integers(1, 128))
def test_the_smallest_number_that_is_enough_is_found(
    needed: int, least: int, most: int, start: int
) -> None:
    """A fleet is bought that is larger than need be, or too small; or a run is made twice."""
    tried: list[int] = []

    def is_enough(num: int) -> bool:
        tried.append(num)
        return num >= needed

    found = find_fewest(is_enough, Replicas(least, most, max(least, min(start, most))))
    assert found == (None if needed > most else max(least, needed))
    assert len(set(tried)) == len(tried) <= 16


@pytest.mark.parametrize("least, most, start", [(0, 2, 1), (3, 2, 3), (1, 2, 3)])
def test_bounds_the_wrong_way_round_are_refused(least: int, most: int, start: int) -> None:
    """They end in a plan of nothing."""
    with pytest.raises(PlanningError):
        Replicas(least, most, start)


def test_nothing_to_try_is_refused() -> None:
    """No setting ends in a plan of nothing."""
    with pytest.raises(PlanningError):
        find_plan(lambda *_: pytest.fail("tried"), [], Replicas(1, 2, 1))
