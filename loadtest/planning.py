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


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas are looked at.

    Args:
        least: fewer are not tried.
        most: more are not tried.
        start: tried first; the closer to the answer, the fewer trials.

    Raises:
        PlanningError: not 1 <= least <= start <= most.
    """

    least: int
    most: int
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.start <= self.most:
            raise PlanningError(
                "a plan needs 1 <= fewest <= most replicas and a start between them, not "
                f"{self.least}, {self.most} and {self.start}"
            )


def find_fewest(is_enough: Callable[[int], bool], replicas: Replicas) -> int | None:
    """The smallest number that is enough; None if `most` is not. More than enough is enough.

    From `start` in strides that double, up or down, until the answer lies between two numbers that
    were tried, then by bisection. No number is tried twice.
    """
    enough: int | None = None
    too_few, num, stride = replicas.least - 1, replicas.start, 1
    if is_enough(num):
        enough = num
        while enough - too_few > 1:
            num = max(replicas.least, enough - stride)
            if not is_enough(num):
                too_few = num
                break
            enough, stride = num, stride * 2
    else:
        too_few = num
        while enough is None:
            if too_few == replicas.most:
                return None
            num = min(replicas.most, too_few + stride)
            if is_enough(num):
                enough = num
            else:
                too_few, stride = num, stride * 2
    while enough - too_few > 1:
        num = (enough + too_few) // 2
        if is_enough(num):
            enough = num
        else:
            too_few = num
    return enough


def find_plan(run: Run, settings: Sequence[Setting], replicas: Replicas) -> Plan:
    """Try settings one after the other; each later one only where it could still win.

    Args:
        run: tries a setting with so many replicas.
        settings: in the order they are tried; the likeliest first saves trials.
        replicas: the fleets that are looked at.

    Raises:
        PlanningError: there is nothing to try.
    """
    if not settings:
        raise PlanningError("a plan needs at least one setting to try")
    trials: dict[tuple[Setting, int], Trial] = {}
    best: Trial | None = None
    for setting in settings:

        def is_enough(num_replicas: int, setting: Setting = setting) -> bool:
            trial = trials[setting, num_replicas] = run(setting, num_replicas)
            return trial.meets_slo

        if best is not None:
            # With as many it may have more to spare; with more it cannot win.
            replicas = Replicas(replicas.least, best.num_replicas, best.num_replicas)
        fewest = find_fewest(is_enough, replicas)
        if fewest is not None:
            found = trials[setting, fewest]
            best = found if best is None else min(best, found, key=_order)
    return Plan(best, tuple(trials.values()))


def _order(trial: Trial) -> tuple[int, float]:
    return trial.num_replicas, trial.strain
