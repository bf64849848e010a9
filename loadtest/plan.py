"""`chunkserve plan`: how many GPUs serve a trace within an SLO, with which step budget, and how
busy they are then. Each try is a simulated fleet (`simulate`); the search is `planning`'s.

    chunkserve plan --trace azure_llm_2023_conv.csv --cost-model h100-llama3-8b \\
        --slo ttft:300 itl:50

Requests of different priority classes are planned as pools of their own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.arrivals import within
from loadtest.block_scale import ScaledTrace
from loadtest.measures import METRICS, Slo, Summary, result_json
from loadtest.planning import Plan, PlanningError, Setting, Trial, find_plan
from loadtest.provenance import keep_result, origin
from loadtest.report import write_report
from loadtest.report_data import Run, report_section
from loadtest.sim_command import add_trace_arguments, read_requests
from loadtest.simulate import FleetConfig, SimResult, simulate
from loadtest.trace import TraceRequest

Json = dict[str, Any]
UNLIMITED_QUEUE = 1_000_000
TRIAL_METRICS = ("ttft", "itl", "tpot", "e2el")


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
    """Plans one pool. Keeps the run of the best try, which is shown in full.

    Args:
        question: what is asked.
        name: of the pool.
    """

    def __init__(self, question: Question, name: str) -> None:
        self._question = question
        self._name = name
        self._results: dict[tuple[Setting, int], Json] = {}

    def plan(self) -> Json:
        """The pool's result: the best fleet's figures, and all that were tried."""
        asked = self._question
        found = find_plan(self._try, asked.settings, asked.min_replicas, asked.max_replicas)
        shown = found.best or min(found.trials, key=lambda trial: trial.strain)
        return {
            **self._results[shown.setting, shown.num_replicas],
            "label": self._name,
            "is_served": found.best is not None,
            "trials": self._told(found),
        }

    def _try(self, setting: Setting, num_replicas: int) -> Trial:
        asked = self._question
        result = simulate(asked.trace, self._fleet(setting, num_replicas))
        strain = _strain(result.summary, asked.slo, asked.percentile)
        is_whole = result.summary.num_failed == 0 and not result.is_saturated
        trial = Trial(setting, num_replicas, is_whole and strain <= 1.0, strain)
        self._results[setting, num_replicas] = _figures(result, asked, trial)
        verdict = "within the SLO" if trial.meets_slo else "not within the SLO"
        print(f"{self._name}: {num_replicas} replicas, {setting}: {verdict}", file=sys.stderr)
        return trial

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

    def _told(self, plan: Plan) -> list[Json]:
        keys = [f"p99_{name}_ms" for name in TRIAL_METRICS]
        return [
            {
                "max_num_batched_tokens": trial.setting.max_num_batched_tokens,
                "chunk_size": trial.setting.chunk_size,
                "num_replicas": trial.num_replicas,
                "meets_slo": trial.meets_slo,
                **{key: self._results[trial.setting, trial.num_replicas][key] for key in keys},
            }
            for trial in plan.trials
        ]


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


# --- the command ----------------------------------------------------------------------------------


def table_of(pools: Sequence[Mapping[str, Any]]) -> str:
    """The plan in words and columns."""
    lines = [
        f"{'pool':12} {'GPUs':>5} {'batched tokens':>15} {'chunk':>6} {'TTFT P99':>9} "
        f"{'ITL P99':>8} {'busy':>6} {'prefill':>8} {'decode':>7} {'cost/h':>9}"
    ]
    for pool in pools:
        cost = pool.get("cost_per_hour")
        lines.append(
            f"{pool['label']:12} {pool['num_replicas']:5} {pool['max_num_batched_tokens']:15} "
            f"{pool['chunk_size']:6} {_ms(pool['p99_ttft_ms']):>9} {_ms(pool['p99_itl_ms']):>8} "
            f"{pool['gpu_utilization']:6.0%} {pool['gpu_utilization_prefill']:8.0%} "
            f"{pool['gpu_utilization_decode']:7.0%} {'–' if cost is None else f'{cost:9.2f}':>9}"
        )
        if not pool["is_served"]:
            lines.append(f"  {pool['label']} is NOT served within the SLO: this is the closest try")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("--trace", required=True, help="a trace or a table of lengths")
    add_trace_arguments(parser.add_argument_group("the trace"))
    parser.add_argument("--cost-model", default="h100-llama3-8b", help="a name or a file")
    parser.add_argument("--slo", nargs="+", default=["ttft:300", "itl:50"], help="NAME:MS ...")
    parser.add_argument("--percentile", type=float, default=99.0, help="that keeps the SLO")
    parser.add_argument("--seconds", type=float, help="no more than the first of the trace")
    parser.add_argument(
        "--budgets", default="2048,1024,4096,512", help="max_num_batched_tokens to try"
    )
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--price", type=float, help="of one GPU for an hour")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path, help="write it as JSON")
    parser.add_argument("--output", type=Path, help="write a page with pictures")


def main(arguments: argparse.Namespace) -> int:
    """Plan, and print the table; 1 if a pool cannot be served."""
    trace = _trace_of(arguments)
    slo = Slo.parse(arguments.slo)
    if not slo.has_bounds:
        raise PlanningError("a plan needs an SLO: give --slo ttft:300 itl:50")
    block = trace.hash_block_tokens
    pools = [
        PoolPlanner(_question(ScaledTrace(part, block), slo, arguments), name).plan()
        for name, part in _pools_of(trace.requests).items()
    ]
    pools = [pool | origin() for pool in pools]
    print(table_of(pools))
    if arguments.save_result:
        keep_result(arguments.save_result, {**origin(), "pools": pools})
    if arguments.output:
        runs = [Run(pool["label"], pool) for pool in pools]
        write_report(runs, arguments.output, f"Plan for {Path(arguments.trace).name}")
    return 0 if all(pool["is_served"] for pool in pools) else 1


def _trace_of(arguments: argparse.Namespace) -> ScaledTrace:
    trace = read_requests(arguments)
    if arguments.seconds is None:
        return trace
    return replace(trace, requests=within(trace.requests, 0.0, arguments.seconds))


def _pools_of(trace: Collection[TraceRequest]) -> dict[str, list[TraceRequest]]:
    priorities = sorted({request.priority for request in trace})
    if len(priorities) == 1:
        return {"all": list(trace)}
    return {
        f"priority {priority}": [each for each in trace if each.priority == priority]
        for priority in priorities
    }


def _question(trace: ScaledTrace, slo: Slo, arguments: argparse.Namespace) -> Question:
    return Question(
        trace=list(trace.requests),
        hash_block_tokens=trace.hash_block_tokens,
        cost_model=CostModel.load(arguments.cost_model),
        slo=slo,
        percentile=arguments.percentile,
        settings=_settings_of(arguments.budgets, arguments.max_num_seqs),
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        max_num_seqs=arguments.max_num_seqs,
        caches_prefixes=not arguments.no_prefix_caching,
        price=arguments.price,
    )


def _settings_of(budgets: str, max_num_seqs: int) -> list[Setting]:
    """Each budget, with prompts that may fill it, and with prompts that leave half of it to
    others.
    """
    try:
        sizes = [int(budget) for budget in budgets.split(",")]
    except ValueError as error:
        raise PlanningError(f"--budgets {budgets}: give numbers such as 512,2048") from error
    for size in sizes:
        if size <= max_num_seqs:
            raise PlanningError(f"a budget of {size} must be above --max-num-seqs {max_num_seqs}")
    return [Setting(size, chunk) for size in sizes for chunk in (size, size // 2)]
