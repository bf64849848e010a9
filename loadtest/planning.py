"""How few replicas serve a load within its SLO, and with which step budget: the search alone.

Knows neither traces nor the simulator: a trial is a function of a setting and a number of replicas.
It takes it that more replicas never serve worse, so noise at the edge moves the answer by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class PlanningError(ValueError):
    """Bounds that no search can start from; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a replica is configured with: tokens in a step, and of one prompt in a step."""

    max_num_batched_tokens: int
    chunk_size: int

    def __str__(self) -> str:
        return f"{self.max_num_batched_tokens}/{self.chunk_size}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What so many replicas of a setting come to.

    Args:
        setting: of each replica.
        num_replicas: of the fleet.
        meets_slo: whether it serves the load; a fleet whose queue grew does not.
        strain: how close to its bound the worst latency is, 1 at the bound; orders settings that
            need as many replicas.
    """

    setting: Setting
    num_replicas: int
    meets_slo: bool
    strain: float


Run = Callable[[Setting, int], Trial]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found: the fewest replicas, and of the settings that need no more the one with the
    most to spare; None if none serves the load with `most` replicas. `trials` in their order.
    """

    best: Trial | None
    trials: tuple[Trial, ...]


def find_plan(run: Run, settings: Sequence[Setting], least: int, most: int) -> Plan:
    """Try settings one after the other; each later one only where it could still win.

    Args:
        run: tries a setting with so many replicas.
        settings: in the order they are tried; the likeliest first saves trials.
        least: fewer replicas are not tried.
        most: more are not tried.

    Raises:
        PlanningError: there is nothing to try.
    """
    if not settings or not 1 <= least <= most:
        raise PlanningError(
            f"a plan needs a setting and 1 <= fewest <= most replicas, not {least} and {most}"
        )
    search = _Search(run, least)
    best: Trial | None = None
    for setting in settings:
        if best is None:
            found = search.find_fewest(setting, most)
        else:
            # With as many it may have more to spare; with more it cannot win.
            found = search.find_fewer(setting, best.num_replicas)
        if found is not None and (best is None or _order(found) < _order(best)):
            best = found
    return Plan(best, tuple(search.trials))


def _order(trial: Trial) -> tuple[int, float]:
    return trial.num_replicas, trial.strain


class _Search:
    def __init__(self, run: Run, least: int) -> None:
        self._run = run
        self._least = least
        self.trials: list[Trial] = []

    def find_fewest(self, setting: Setting, most: int) -> Trial | None:
        """Of at most `most`; half of them is tried first."""
        best = self._try(setting, most)
        return self._bisect(best, self._least - 1) if best.meets_slo else None

    def find_fewer(self, setting: Setting, most: int) -> Trial | None:
        """The same, where the answer is `most` or hardly less: one fewer is tried first, then two
        fewer than that, four, …
        """
        best = self._try(setting, most)
        if not best.meets_slo:
            return None
        stride = 1
        while best.num_replicas > self._least:
            trial = self._try(setting, max(self._least, best.num_replicas - stride))
            if not trial.meets_slo:
                return self._bisect(best, trial.num_replicas)
            best, stride = trial, stride * 2
        return best

    def _bisect(self, best: Trial, too_few: int) -> Trial:
        """Between a number that serves the load and one that does not."""
        while best.num_replicas - too_few > 1:
            trial = self._try(best.setting, (best.num_replicas + too_few) // 2)
            if trial.meets_slo:
                best = trial
            else:
                too_few = trial.num_replicas
        return best

    def _try(self, setting: Setting, num_replicas: int) -> Trial:
        self.trials.append(self._run(setting, num_replicas))
        return self.trials[-1]
