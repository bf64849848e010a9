"""From turns to what is told: medians with their range, and ratios between services.

A ratio is ours over theirs, of the same round: what the machine did meanwhile is in both. So more
than 1 is better for rates and worse for times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.peers.turns import TurnResult


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several rounds."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


def counted(results: Iterable[TurnResult]) -> list[TurnResult]:
    """Those in which nobody disturbed and no request failed."""
    return [result for result in results if result.counts]


def spread_of(
    results: Sequence[TurnResult], service: str, workload: str, figure: str
) -> Spread | None:
    """A figure of one service over all rounds that count."""
    return Spread.of(list(_by_round(results, service, workload, figure).values()))


def ratio_of(
    results: Sequence[TurnResult], pair: tuple[str, str], workload: str, figure: str
) -> Spread | None:
    """A figure of the first service over that of the second, round by round.

    None where no round has both; a round in which the second is 0 has none.
    """
    ours = _by_round(results, pair[0], workload, figure)
    theirs = _by_round(results, pair[1], workload, figure)
    shared = [number for number in ours if theirs.get(number)]
    return Spread.of([ours[number] / theirs[number] for number in shared])


def _by_round(
    results: Sequence[TurnResult], service: str, workload: str, figure: str
) -> dict[int, float]:
    return {
        result.turn.round_number: result.figures[figure]
        for result in counted(results)
        if result.turn.service == service
        and result.turn.workload == workload
        and figure in result.figures
    }
