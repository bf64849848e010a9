"""The highest request rate that a server sustains under an SLO, found by loads at many rates.

    chunkserve bench capacity --goodput ttft:300 itl:100 --num-prompts 200 --start-rate 1

A rate is sustained if `--slo-percentile` of each bound's metric keeps it, no more requests than the
rest fail, and the queue does not grow: median scheduling delay of at most 2 s (Sarathi-Serve). From
outside, that delay is TTFT beyond the median TTFT of single requests on the idle server, before
the first load: an upper bound, since requests that are computed beside others take longer too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

from loadtest.capacity import Capacity, SearchBounds, Trial, find_capacity
from loadtest.client import Ask, Client, Target
from loadtest.load_arguments import (
    WorkloadSettings,
    add_workload_arguments,
    workload_of,
)
from loadtest.load_prompts import Prompts
from loadtest.load_run import LoadRun
from loadtest.load_sources import prompts_of, read_requests
from loadtest.load_tally import LoadTally
from loadtest.load_workload import plan_requests
from loadtest.measures import DEFINITIONS, Slo, Summary, result_json
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.send_times import steady_times
from loadtest.target_arguments import ArgumentsError, add_target_arguments, target_of
from loadtest.target_check import wait_for_target
from loadtest.trace import TraceRequest

NUM_IDLE_REQUESTS = 5
MIN_LOAD_S = 30.0
"""In this time a queue that grows by an eighth of the rate comes to the median delay that the
sustained-queue test allows; in less, only a server that is far too slow is found out."""
TOLD_METRICS = ("ttft", "tpot", "itl", "e2el", "lag")
INTERRUPTED = 130
Json = dict[str, Any]


def keeps_slo(summary: Summary, percentile: float) -> bool:
    """Whether this percentile of each metric that has a bound keeps it, failed requests counted as
    beyond any bound.
    """
    num_requests = summary.num_completed + summary.num_failed
    if not summary.num_completed or summary.num_failed > num_requests * (1 - percentile / 100):
        return False
    slo = summary.slo
    bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "itl": slo.itl_s, "e2el": slo.e2e_s}
    return all(
        summary.distributions[name].percentile(percentile) <= bound
        for name, bound in bounds.items()
        if bound is not None and summary.distributions[name].count
    )


@dataclass(frozen=True, slots=True)
class CapacitySettings:
    """What is searched, and where. `percentile` of each metric has to keep the SLO."""

    target: Target
    workload: WorkloadSettings
    slo: Slo
    percentile: float
    burstiness: float
    bounds: SearchBounds
    label: str
    ready_s: float


class RateTrials:
    """Loads of one server at one rate after the other.

    Args:
        settings: of all of them.
        requests: that each load sends.
        prompts: theirs.
    """

    def __init__(
        self, settings: CapacitySettings, requests: Collection[TraceRequest], prompts: Prompts
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._prompts = prompts
        self._next_number = 0
        self._told: list[Json] = []
        self._idle_ttft_s = asyncio.run(self._measure_idle())

    @property
    def idle_ttft_s(self) -> float:
        """Median TTFT of single requests on the idle server."""
        return self._idle_ttft_s

    @property
    def told(self) -> list[Json]:
        """What each load came to so far, by rate."""
        return sorted(self._told, key=lambda row: float(row["request_rate"]))

    def run(self, rate: float) -> Trial:
        """Load the server at this rate until all requests have ended."""
        num_requests = len(self._requests)
        seed = self._settings.workload.seed
        times_s = steady_times(num_requests, rate, self._settings.burstiness, seed)
        summary = asyncio.run(self._load(self._requests, times_s, None))
        # A server that answers nothing keeps everything waiting.
        ttft = summary.distributions["ttft"]
        delay_s = ttft.percentile(50) - self._idle_ttft_s if ttft.count else float("inf")
        trial = Trial(rate, keeps_slo(summary, self._settings.percentile), max(0.0, delay_s))
        print(_line_of(trial, summary, self._settings.percentile), file=sys.stderr)
        self._told.append(_row_of(trial, summary, self._settings.percentile))
        return trial

    async def _measure_idle(self) -> float:
        some = list(islice(self._requests, NUM_IDLE_REQUESTS))
        summary = await self._load(some, repeat(None), 1)
        if not summary.num_completed:
            raise ArgumentsError(
                f"no single request completes on the idle server: {', '.join(summary.errors)}"
            )
        return summary.distributions["ttft"].percentile(50)

    async def _load(
        self,
        requests: Collection[TraceRequest],
        times_s: Iterable[float | None],
        max_concurrency: int | None,
    ) -> Summary:
        # Every load has prompts of its own: none finds those of another in the prefix cache.
        numbers = count(self._next_number)
        self._next_number += len(requests)
        tally = LoadTally(self._settings.slo)
        async with Client(self._settings.target) as client:
            run = LoadRun(client, lambda ended: tally.add(ended, run.start_s), max_concurrency)
            await run.run(plan_requests(requests, self._prompts, times_s, numbers))
        return tally.summary(tally.last_end_s)


def _line_of(trial: Trial, summary: Summary, percentile: float) -> str:
    figures = [
        f"p{percentile:g} {name} {summary.distributions[name].percentile(percentile) * 1e3:.0f} ms"
        for name in ("ttft", "itl")
        if summary.distributions[name].count
    ]
    return (
        f"{trial.rate:8.3f} requests/s: {'sustained' if trial.is_sustained else 'not sustained'}; "
        f"SLO {'kept' if trial.meets_slo else 'missed'}, "
        f"median delay {trial.median_scheduling_delay_s:.2f} s, {', '.join(figures)}, "
        f"{summary.num_failed} failed"
    )


def _row_of(trial: Trial, summary: Summary, percentile: float) -> Json:
    figures = result_json(summary, TOLD_METRICS, sorted({50.0, 99.0, percentile}))
    return {
        "request_rate": trial.rate,
        "is_sustained": trial.is_sustained,
        "meets_slo": trial.meets_slo,
        "median_scheduling_delay_ms": _finite_ms(trial.median_scheduling_delay_s),
        **{key: figures[key] for key in ("completed", "failed", "request_throughput")},
        **{key: value for key, value in figures.items() if key.endswith("_ms")},
    }


def _finite_ms(seconds: float) -> float | None:
    # JSON has no infinity.
    return None if math.isinf(seconds) else seconds * 1e3


def run_search(settings: CapacitySettings, model: str | None) -> Json:
    """Check the server, search, give the result.

    Raises:
        ValueError: the flags, the trace or the server are not fit for it; one line says why.
    """
    trace = read_requests(settings.workload)
    first = next(iter(trace.requests))
    prompts = prompts_of(settings.workload, settings.target, trace.hash_block_tokens)
    probe = Ask(prompts.prompt(first, -1), 1)
    checked = asyncio.run(wait_for_target(settings.target, model, probe, settings.ready_s))
    if checked.num_prompt_tokens is not None:
        prompts = prompts.fitted(first, checked.num_prompt_tokens)
    settings = replace(settings, target=checked.target)
    trials = RateTrials(settings, trace.requests, prompts)
    capacity = find_capacity(trials.run, settings.bounds)
    return _result_of(settings, capacity, trials, len(trace.requests))


def caution_of(capacity: float, num_prompts: int) -> str | None:
    """What to make of a rate that was sustained for a moment alone: any server takes in a handful
    of requests. None: the load was long enough.
    """
    if not capacity or num_prompts / capacity >= MIN_LOAD_S:
        return None
    return (
        f"{num_prompts} requests at {capacity:.3g}/s are sent within {num_prompts / capacity:.3g} "
        f"s, too soon for a queue to show: give --num-prompts {math.ceil(capacity * MIN_LOAD_S)} "
        "or more"
    )


def _result_of(
    settings: CapacitySettings, capacity: Capacity, trials: RateTrials, num_prompts: int
) -> Json:
    return {
        **origin(),
        "label": settings.label,
        "model_id": settings.target.model,
        "num_prompts_per_trial": num_prompts,
        "slo": settings.slo.as_text(),
        "slo_percentile": settings.percentile,
        "capacity": capacity.rate,
        "lowest_rate_not_sustained": capacity.failed_rate,
        "caution": caution_of(capacity.rate, num_prompts),
        "idle_median_ttft_ms": trials.idle_ttft_s * 1e3,
        "sweep": trials.told,
        "definitions": DEFINITIONS,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags: those of `bench load` for server and workload, and those of the search."""
    add_target_arguments(parser)
    add_workload_arguments(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--goodput", nargs="+", required=True, metavar="KEY:MS", help="SLO, as in ttft:300 itl:100"
    )
    group.add_argument("--slo-percentile", type=float, default=99.0, help="that keeps the SLO")
    group.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson")
    group.add_argument("--start-rate", type=float, default=1.0, help="requests per second")
    group.add_argument("--lowest-rate", type=float, default=0.01)
    group.add_argument("--highest-rate", type=float, default=100_000.0)
    group.add_argument("--tolerance", type=float, default=0.05, help="relative, of the result")
    group.add_argument("--label", default="capacity", help="what reports call it")
    group.add_argument("--save-result", type=Path, help="write the result to this file as well")


def settings_of(arguments: argparse.Namespace) -> CapacitySettings:
    """What the flags come to.

    Raises:
        ValueError: one is out of range; the message is one line.
    """
    if not 0.0 < arguments.slo_percentile < 100.0:
        raise ArgumentsError("--slo-percentile must lie between 0 and 100")
    bounds = SearchBounds(
        arguments.start_rate, arguments.lowest_rate, arguments.highest_rate, arguments.tolerance
    )
    return CapacitySettings(
        target=target_of(arguments),
        workload=workload_of(arguments),
        slo=Slo.parse(arguments.goodput),
        percentile=arguments.slo_percentile,
        burstiness=arguments.burstiness,
        bounds=bounds,
        label=arguments.label,
        ready_s=arguments.ready_check_timeout_sec,
    )


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the result as JSON; 1 if no rate was sustained, 130 if interrupted."""
    # What cannot be kept afterwards is told before.
    check_can_keep(arguments.save_result)
    try:
        result = run_search(settings_of(arguments), arguments.model)
    except KeyboardInterrupt:
        print("interrupted; the rates that were tried stand above", file=sys.stderr)
        return INTERRUPTED
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
    print(json.dumps(result, indent=2))
    if result["caution"]:
        print(f"warning: {result['caution']}", file=sys.stderr)
    return 0 if result["capacity"] else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
