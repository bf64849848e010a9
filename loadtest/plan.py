"""`chunkserve plan`: how many GPUs serve a trace within an SLO, with which step budget, and how
busy they are then. Owns the command; a pool is planned in `plan_pool`.

    chunkserve plan --trace azure_llm_2023_conv.csv --cost-model h100-llama3-8b \\
        --slo ttft:300 itl:50

Requests of different priority classes are planned as pools of their own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.execution.cost_model import CostModel
from loadtest.arrivals import within
from loadtest.block_scale import ScaledTrace
from loadtest.measures import Slo
from loadtest.plan_pool import PoolPlanner, Question
from loadtest.planning import PlanningError, Setting
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.report import write_report
from loadtest.report_data import Run
from loadtest.sim_command import add_trace_arguments, read_requests
from loadtest.trace import TraceRequest

Json = dict[str, Any]


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
    _check(arguments)
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


def _check(arguments: argparse.Namespace) -> None:
    """What would end a plan after its first trial, or make nonsense of it, is told before."""
    if arguments.max_num_seqs < 1:
        raise PlanningError("--max-num-seqs must be at least 1")
    if not 0.0 < arguments.percentile <= 100.0:
        raise PlanningError("--percentile must be above 0 and at most 100")
    if arguments.price is not None and not 0.0 <= arguments.price < math.inf:
        raise PlanningError("--price must be 0 or more")
    check_can_keep(arguments.save_result)
    check_can_keep(arguments.output)


def _trace_of(arguments: argparse.Namespace) -> ScaledTrace:
    trace = read_requests(arguments)
    if arguments.seconds is None:
        return trace
    return replace(trace, requests=within(trace.requests, 0.0, arguments.seconds))


def _pools_of(trace: Collection[TraceRequest]) -> dict[str, list[TraceRequest]]:
    priorities = sorted({request.priority for request in trace})
    if len(priorities) == 1:
        return {"all requests": list(trace)}
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
