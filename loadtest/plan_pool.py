"""The plan of one pool: the fewest replicas that serve its part of a trace within the SLO.

Each try is a simulated fleet, which ends as soon as it has failed; the search is `planning`'s and
begins where the cost model says. A long trace is searched on its busiest stretch, and the answer
confirmed on the whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.fleet_work import find_least_replicas, full_step_s
from loadtest.measures import METRICS, Slo, Summary, result_json
from loadtest.planning import Replicas, Setting, Trial, find_fewest, find_plan
from loadtest.report_data import report_section
from loadtest.simulate import FleetConfig, SimResult, simulate
from loadtest.slo_guard import SloGuard, SloLost
from loadtest.trace import TraceRequest

Json = dict[str, Any]
UNLIMITED_QUEUE = 1_000_000
TRIAL_METRICS = ("ttft", "itl", "tpot", "e2el")
MAX_SEARCHED = 30_000
"""Requests that a search tries fleets with; more only confirm its answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a pool has to serve, and what it may be made of.

    Args:
        hash_block_tokens: tokens that a hash id of the trace stands for.
        slo: bounds that `percentile` percent of requests (of gaps, for itl) have to keep.
        price: of one GPU for an hour; None: not told.
    """

    trace: Sequence[TraceRequest]
    hash_block_tokens: int
    cost_model: CostModel
    slo: Slo
    percentile: float
    settings: Sequence[Setting]
    min_replicas: int
    max_replicas: int
    max_num_seqs: int
    caches_prefixes: bool
    price: float | None


class PoolPlanner:
    """Plans one pool. Keeps the figures of every try that went to its end.

    Args:
        question: what is asked.
        name: of the pool.
    """

    def __init__(self, question: Question, name: str) -> None:
        self._question = question
        self._name = name
        self._figures: dict[Trial, Json] = {}

    def plan(self) -> Json:
        """The pool's result: the best fleet's figures, and all that were tried."""
        asked = self._question
        searched = find_busiest_stretch(asked.trace, MAX_SEARCHED)
        found = find_plan(
            lambda setting, num: self._try(searched, setting, num),
            self._likeliest_first(),
            self._replicas(),
        )
        best = found.best
        if best is not None and len(searched) < len(asked.trace):
            best = self._confirm(best)
        if best is not None:
            figures = self._figures[best]
        else:
            closest = min(found.trials, key=lambda trial: (trial.strain, -trial.num_replicas))
            figures = self._run_to_its_end(closest)
        return {
            **figures,
            "label": self._name,
            "is_served": best is not None,
            "trials": [self._told(trial) for trial in found.trials],
        }

    def _replicas(self) -> Replicas:
        asked = self._question
        least = find_least_replicas(asked.trace, asked.cost_model, asked.max_num_seqs)
        start = max(asked.min_replicas, min(least, asked.max_replicas))
        return Replicas(asked.min_replicas, asked.max_replicas, start)

    def _likeliest_first(self) -> list[Setting]:
        """Settings whose full steps are longer than a gap may be come last."""
        asked = self._question
        gap_s = min(asked.slo.itl_s or math.inf, asked.slo.tpot_s or math.inf)

        def is_too_long(setting: Setting) -> bool:
            return full_step_s(asked.cost_model, setting.max_num_batched_tokens) > gap_s

        return sorted(asked.settings, key=is_too_long)

    def _confirm(self, found: Trial) -> Trial | None:
        """The same setting, on the whole trace: with as many replicas, or a few more."""
        trials: dict[int, Trial] = {}

        def is_enough(num_replicas: int) -> bool:
            trials[num_replicas] = self._try(self._question.trace, found.setting, num_replicas)
            return trials[num_replicas].meets_slo

        num_found, most = found.num_replicas, self._question.max_replicas
        fewest = find_fewest(is_enough, Replicas(num_found, most, num_found))
        return None if fewest is None else trials[fewest]

    def _try(self, trace: Sequence[TraceRequest], setting: Setting, num_replicas: int) -> Trial:
        asked = self._question
        guard = SloGuard(trace, asked.slo, asked.percentile)
        try:
            result = simulate(trace, self._fleet(setting, num_replicas), guard.take)
        except SloLost:
            trial = Trial(setting, num_replicas, meets_slo=False, strain=math.inf)
        else:
            strain = _strain(result.summary, asked.slo, asked.percentile)
            is_whole = result.summary.num_failed == 0 and not result.is_saturated
            trial = Trial(setting, num_replicas, is_whole and strain <= 1.0, strain)
            self._figures[trial] = _figures(result, asked, trial)
        verdict = "within the SLO" if trial.meets_slo else "not within the SLO"
        print(f"{self._name}: {num_replicas} replicas, {setting}: {verdict}", file=sys.stderr)
        return trial

    def _run_to_its_end(self, trial: Trial) -> Json:
        """Of a try that failed early, what it would have come to."""
        asked = self._question
        if trial not in self._figures:
            result = simulate(asked.trace, self._fleet(trial.setting, trial.num_replicas))
            self._figures[trial] = _figures(result, asked, trial)
        return self._figures[trial]

    def _fleet(self, setting: Setting, num_replicas: int) -> FleetConfig:
        asked = self._question
        scheduler = SchedulerConfig(
            chunk_size=setting.chunk_size,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_num_seqs=asked.max_num_seqs,
            max_num_waiting=UNLIMITED_QUEUE,
        )
        cache = CacheConfig(enable_prefix_caching=asked.caches_prefixes)
        return FleetConfig(
            asked.cost_model,
            num_replicas,
            scheduler,
            cache,
            hash_block_tokens=asked.hash_block_tokens,
            slo=asked.slo,
        )

    def _told(self, trial: Trial) -> Json:
        """A try as the result tells it; one that ended early has no latencies."""
        figures = self._figures.get(trial, {})
        return {
            "max_num_batched_tokens": trial.setting.max_num_batched_tokens,
            "chunk_size": trial.setting.chunk_size,
            "num_replicas": trial.num_replicas,
            "meets_slo": trial.meets_slo,
            "ended_early": trial.strain == math.inf,
            **{f"p99_{name}_ms": figures.get(f"p99_{name}_ms") for name in TRIAL_METRICS},
        }


def find_busiest_stretch(trace: Sequence[TraceRequest], num_requests: int) -> list[TraceRequest]:
    """So many requests in a row, those that came within the shortest time; all if there are no
    more.
    """
    ordered = sorted(trace, key=lambda traced: traced.timestamp_s)
    firsts = range(max(1, len(ordered) - num_requests + 1))
    first = min(
        firsts,
        key=lambda at: (
            ordered[min(at + num_requests, len(ordered)) - 1].timestamp_s - ordered[at].timestamp_s
        ),
    )
    return ordered[first : first + num_requests]


def _strain(summary: Summary, slo: Slo, percentile: float) -> float:
    """The largest share of a bound that is used up; infinite where nothing was completed."""
    bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "itl": slo.itl_s, "e2el": slo.e2e_s}
    if not summary.num_completed:
        return math.inf
    return max(
        summary.distributions[name].percentile(percentile) / bound
        for name, bound in bounds.items()
        if bound is not None and summary.distributions[name].count
    )


def _figures(result: SimResult, asked: Question, trial: Trial) -> Json:
    use = result.utilisation
    figures = result_json(result.summary, METRICS, sorted({50.0, 90.0, 99.0, asked.percentile}))
    figures |= {
        "num_replicas": trial.num_replicas,
        "max_num_batched_tokens": trial.setting.max_num_batched_tokens,
        "chunk_size": trial.setting.chunk_size,
        "is_saturated": result.is_saturated,
        "gpu_utilization": round(use.busy, 4),
        "gpu_utilization_prefill": round(use.prefill, 4),
        "gpu_utilization_decode": round(use.decode, 4),
        "gpu_active_in_prefill": round(use.prefill_active, 4),
        "gpu_active_in_decode": round(use.decode_active, 4),
        "report": report_section(result.summary, result.timeline, result.steps),
    }
    if asked.price is not None:
        per_hour = asked.price * trial.num_replicas
        tokens_per_hour = figures["output_throughput"] * 3600
        figures["cost_per_hour"] = per_hour
        figures["cost_per_million_output_tokens"] = per_hour / max(tokens_per_hour, 1e-9) * 1e6
    return figures
