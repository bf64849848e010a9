"""The net of random schedules catches faults: each hand-made mutant of the core breaks it within a
few steps.
"""

from __future__ import annotations

import pytest
from mutants import MUTANTS
from schedule_random import run_schedules

NUM_STEPS = 2000
SEEDS = (7, 11, 13)


def find_fault(num_steps: int) -> Exception | None:
    """What the random schedules raise, in so many steps of each fixed seed; None if nothing."""
    try:
        for seed in SEEDS:
            run_schedules(seed=seed, num_steps=num_steps, num_steps_an_episode=60)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_net_kills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This fault could come into the core and the random schedules would not notice."""
    MUTANTS[name](monkeypatch)
    assert find_fault(NUM_STEPS) is not None, MUTANTS[name].__doc__


def test_without_a_mutant_the_net_is_silent() -> None:
    """The net fails on the sound core, so that its failures on mutants say nothing."""
    assert find_fault(NUM_STEPS) is None
