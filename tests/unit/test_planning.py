"""The search for the fewest replicas, over fleets whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.planning import PlanningError, Setting, Trial, find_plan

SETTINGS = [Setting(budget, budget) for budget in (512, 1024, 2048, 4096)]


@given(
    st.lists(st.integers(1, 70), min_size=4, max_size=4),
    st.integers(1, 20),
    st.integers(20, 64),
)
def test_the_fewest_replicas_are_found(needs: list[int], least: int, most: int) -> None:
    """A setting that needs fewer is missed because it comes late, or a fleet too small is named."""
    needed = dict(zip(SETTINGS, needs, strict=True))

    def run(setting: Setting, num_replicas: int) -> Trial:
        assert least <= num_replicas <= most
        strain = needed[setting] / num_replicas
        return Trial(setting, num_replicas, num_replicas >= needed[setting], strain)

    plan = find_plan(run, SETTINGS, least, most)
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

    assert len(find_plan(run, SETTINGS, 1, 128).trials) <= 8 + 3 * 2


@pytest.mark.parametrize("settings, least, most", [([], 1, 2), (SETTINGS, 0, 2), (SETTINGS, 3, 2)])
def test_nothing_to_try_is_refused(settings: list[Setting], least: int, most: int) -> None:
    """Bounds the wrong way round end in a plan of nothing."""
    with pytest.raises(PlanningError):
        find_plan(lambda *_: pytest.fail("tried"), settings, least, most)
