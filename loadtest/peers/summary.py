"""What a benchmark came to, as data: figures, ratios, shares of the machine and of its limits.

Everything that the table and the plot show is in it, so that a kept file can be shown again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.peers.figures import FIGURES
from loadtest.peers.hardware_limits import Limits, ModelShapes
from loadtest.peers.ratios import Spread, ratio_of, spread_of
from loadtest.peers.turns import TurnResult

Json = dict[str, Any]
PREFILLS = {"W6": 4096, "W6chunk": 512}
DECODE, DECODE_FIGURE = "W5", "tokens/s after the first"
PREFILL_FIGURE = "prefill tokens/s"


@dataclass(frozen=True, slots=True)
class Entrant:
    """A service that took part.

    Args:
        name: in tables.
        dtype: of its weights.
        weight_bytes: that one decode step reads.
        start_s: from its start until it was ready.
    """

    name: str
    dtype: str
    weight_bytes: float | None
    start_s: float


def summarise(
    results: Sequence[TurnResult],
    entrants: Sequence[Entrant],
    limits: Limits | None,
    shapes: ModelShapes,
    left_out: Mapping[str, str],
) -> Json:
    """The result of a benchmark; the first entrant is the one that ratios are of.

    Args:
        results: of all turns.
        entrants: who took part.
        limits: of the machine, if they were measured.
        shapes: of the model.
        left_out: who did not come up or ended on the way, and why.
    """
    ours, *others = [entrant.name for entrant in entrants]
    workloads = list(dict.fromkeys(result.turn.workload for result in results))
    summary: Json = {
        "services": {each.name: asdict(each) for each in entrants},
        "figures": _by_figure(
            workloads,
            [ours, *others],
            lambda name, workload, figure: spread_of(results, name, workload, figure),
        ),
        "ratios": _by_figure(
            workloads,
            others,
            lambda name, workload, figure: ratio_of(results, (ours, name), workload, figure),
        ),
        "cores": _shares(results),
        "dropped": [
            {**asdict(result.turn), "why": result.dropped} for result in results if result.dropped
        ],
        "failed": [
            {**asdict(result.turn), "num_failed": result.num_failed, "errors": dict(result.errors)}
            for result in results
            if result.num_failed
        ],
        "left_out": dict(left_out),
        "turns": [asdict(result) for result in results],
    }
    if limits is not None:
        summary["limits"] = asdict(limits)
        summary["limit_shares"] = {
            each.name: _limit_shares(results, each, limits, shapes) for each in entrants
        }
    return summary


def _by_figure(
    workloads: Sequence[str],
    names: Sequence[str],
    spread: Callable[[str, str, str], Spread | None],
) -> Json:
    """What `spread` gives of a service, a workload and a figure; those without any are left out."""
    return {
        workload: {
            figure.name: {
                name: asdict(found)
                for name in names
                if (found := spread(name, workload, figure.name)) is not None
            }
            for figure in FIGURES[workload]
        }
        for workload in workloads
    }


def _shares(results: Sequence[TurnResult]) -> Json:
    """Cores by service and workload, each the median over rounds, dropped turns included."""
    found: dict[str, dict[str, list[TurnResult]]] = {}
    for result in results:
        found.setdefault(result.turn.service, {}).setdefault(result.turn.workload, []).append(
            result
        )
    return {
        service: {workload: _median_share(turns) for workload, turns in by_workload.items()}
        for service, by_workload in found.items()
    }


def _median_share(turns: Sequence[TurnResult]) -> Json:
    keys = ("service_cores", "client_cores", "others_cores", "stolen_cores", "taken_s")
    spreads = {key: Spread.of([getattr(turn.share, key) for turn in turns]) for key in keys}
    return {key: round(spread.median, 3) for key, spread in spreads.items() if spread is not None}


def _limit_shares(
    results: Sequence[TurnResult], entrant: Entrant, limits: Limits, shapes: ModelShapes
) -> Json:
    """Shares of what the machine can do: `MBU` of the single stream, `prefill N` of products."""
    shares: Json = {}
    decode = spread_of(results, entrant.name, DECODE, DECODE_FIGURE)
    if decode is not None and entrant.weight_bytes is not None:
        shares["MBU"] = decode.median * entrant.weight_bytes / limits.read_bytes_per_s
    best = max(limits.gemm_flop_per_s.values())
    for workload, num_tokens in PREFILLS.items():
        prefill = spread_of(results, entrant.name, workload, PREFILL_FIGURE)
        if prefill is not None:
            flop_per_s = shapes.prefill_flop(num_tokens) / num_tokens * prefill.median
            shares[f"prefill {num_tokens}"] = flop_per_s / best
    return shares
