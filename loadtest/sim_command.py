"""`chunkserve simulate`: a trace and a fleet from the command line, the result as a table and as
JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from deployments.execution.cost_model import cost_model_names
from loadtest.arrivals import arriving_at
from loadtest.block_scale import ScaledTrace
from loadtest.converters import open_trace
from loadtest.measures import DEFINITIONS, result_json
from loadtest.number_types import whole_number
from loadtest.policies import POLICIES
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.report_data import report_section
from loadtest.sim_config import describe_fleet
from loadtest.simulate import ROUTINGS, FleetConfig, SimResult, SimulationError, simulate
from loadtest.trace_changes import add_scale_arguments, changes_of, first_requests

SCHEDULER_KEYS = (
    "chunk_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "batch_timeout_ms",
    "overlap_ratio",
    "max_num_waiting",
)
FLEET_KEYS = (
    "cost_model",
    "replicas",
    "policy",
    "routing",
    "slo",
    "max_model_len",
)
CACHE_KEYS = ("block_size", "num_blocks")
PERCENTILES = (50, 90, 99)
MAX_REPLICAS, MAX_BLOCKS = 10_000, 10_000_000
"""More do not fit into memory here."""
TABLE = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `chunkserve simulate`."""
    parser.add_argument("trace", help="Mooncake JSONL, Azure, BurstGPT or lengths CSV")
    parser.add_argument(
        "--cost-model",
        help=f"a file, or one of: {', '.join(cost_model_names())}",
    )
    parser.add_argument(
        "--replicas", type=whole_number(1, MAX_REPLICAS), help="1 if no config says more"
    )
    parser.add_argument("--policy", choices=list(POLICIES), help="chunked by default")
    parser.add_argument("--routing", choices=ROUTINGS, help="prefix by default")
    parser.add_argument("--slo", nargs="+", help="of a good request: ttft:300 itl:50")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path, help="write it as JSON, for reports")
    parser.add_argument("--label", help="what reports call it; else the file's name")
    add_trace_arguments(parser.add_argument_group("the trace"))
    _add_replica_arguments(parser.add_argument_group("a replica"))


def add_trace_arguments(group: argparse._ArgumentGroup) -> None:
    """How `read_requests` changes the trace."""
    group.add_argument("--num-prompts", type=int, help="its first requests alone")
    add_scale_arguments(group)
    group.add_argument(
        "--request-rate", type=float, help="new arrivals, so many a second, instead of its times"
    )
    group.add_argument("--burstiness", type=float, default=1.0, help="of them; 1 is Poisson")


def _add_replica_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config", type=Path, help="a fleet such as configs/sim.yaml, or the file of a service"
    )
    for key in (*SCHEDULER_KEYS, *CACHE_KEYS):
        kind: Callable[[str], float] = int
        if key in ("batch_timeout_ms", "overlap_ratio"):
            kind = float
        elif key == "num_blocks":
            kind = whole_number(1, MAX_BLOCKS)
        group.add_argument(f"--{key.replace('_', '-')}", type=kind, help="instead of the config's")
    group.add_argument("--no-prefix-caching", action="store_true")
    group.add_argument("--max-model-len", type=int)


def main(arguments: argparse.Namespace) -> int:
    """Simulate, print the table, save the result; 1 if no request completed."""
    check_can_keep(arguments.save_result)
    trace = read_requests(arguments)
    fleet = replace(fleet_of(arguments), hash_block_tokens=trace.hash_block_tokens)
    began_s = perf_counter()
    result = simulate(list(trace.requests), fleet)
    wall_s = perf_counter() - began_s
    if arguments.save_result is not None:
        saved = {**origin(), "label": arguments.label, **sim_result_json(result, fleet)}
        keep_result(arguments.save_result, saved)
    print(describe(result, fleet, wall_s))
    if result.is_saturated:
        print(saturation_warning(result), file=sys.stderr)
    if arguments.save_result is not None:
        print(f"saved to {arguments.save_result}")
    return 0 if result.summary.num_completed else 1


def read_requests(arguments: argparse.Namespace) -> ScaledTrace:
    """The requests that the arguments ask for, and what their hash ids stand for.

    Raises:
        TraceError: the trace cannot be used, or has fewer requests than are wanted.
        SimulationError: it has no arrivals, and none are asked for.
    """
    loaded = open_trace(arguments.trace)
    if arguments.request_rate is None and not loaded.has_arrivals:
        raise SimulationError(f"{arguments.trace} has no arrivals: give --request-rate")
    trace = changes_of(arguments).apply(first_requests(loaded.requests, arguments.num_prompts))
    if arguments.request_rate is None:
        return trace
    rate, burstiness = arguments.request_rate, arguments.burstiness
    return replace(trace, requests=arriving_at(trace.requests, rate, burstiness, arguments.seed))


def fleet_of(arguments: argparse.Namespace) -> FleetConfig:
    """The fleet that the arguments ask for.

    Raises:
        ConfigError: the config file cannot be used.
        CostModelError: there is no such cost model.
        SimulationError: the settings do not fit together.
    """
    cache = _given(arguments, CACHE_KEYS)
    if arguments.no_prefix_caching:
        cache["enable_prefix_caching"] = False
    options = _given(arguments, FLEET_KEYS)
    parts = {"scheduler": _given(arguments, SCHEDULER_KEYS), "cache": cache}
    fleet = describe_fleet(arguments.config, {**options, **parts}).fleet()
    return replace(fleet, seed=arguments.seed)


def _given(arguments: argparse.Namespace, keys: Sequence[str]) -> dict[str, Any]:
    values = {key: getattr(arguments, key) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


def describe(result: SimResult, fleet: FleetConfig, wall_s: float) -> str:
    """The result as text for a console."""
    figures = result_json(result.summary, percentiles=PERCENTILES)
    shares = result.utilisation
    hit_rate = result.num_cached_tokens / max(1, result.num_prompt_tokens)
    lines = [
        f"{fleet.num_replicas} x {fleet.cost_model.gpu}, {fleet.cost_model.model}, "
        f"{fleet.policy}: {result.duration_s:.1f} s simulated in {wall_s:.1f} s",
        f"{figures['completed']} requests, {figures['request_throughput']:.2f}/s, "
        f"{figures['output_throughput']:.0f} output tokens/s",
    ]
    if figures["request_goodput"] is not None:
        lines.append(f"{figures['request_goodput']:.2f} good requests/s")
    if figures["errors"]:
        lines.append("errors: " + ", ".join(f"{k} {n}" for k, n in figures["errors"].items()))
    lines += [
        f"busy {shares.busy:.1%}: prefill {shares.prefill:.1%}, decode {shares.decode:.1%}; "
        f"prefix hits {hit_rate:.1%}; {result.num_preemptions} preemptions",
        f"{'ms':6}{'mean':>10}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES),
    ]
    for name in TABLE:
        cells = (figures[f"{kind}_{name}_ms"] for kind in ("mean", "p50", "p90", "p99"))
        row = "".join(f"{'-' if cell is None else f'{cell:.1f}':>10}" for cell in cells)
        lines.append(f"{name:6}{row}")
    return "\n".join([*lines, "", DEFINITIONS])


def saturation_warning(result: SimResult) -> str:
    """What to make of a run whose queue grew to the end."""
    return (
        f"warning: the fleet is saturated: its queue grew to the end (half of the requests waited "
        f"{result.queued.percentile(50):.1f} s or more), so latencies tell of the length of the "
        "trace; add replicas or lower the rate"
    )


def sim_result_json(result: SimResult, fleet: FleetConfig) -> dict[str, Any]:
    """The whole result: the client's keys, and what only a simulation knows."""
    return {
        **result_json(result.summary, percentiles=PERCENTILES),
        "cost_model": fleet.cost_model.name,
        "num_replicas": fleet.num_replicas,
        "policy": fleet.policy,
        "routing": fleet.routing,
        "scheduler": fleet.scheduler.model_dump(),
        "cache": {**fleet.cache.model_dump(), "num_blocks": fleet.num_blocks},
        "seed": fleet.seed,
        "is_saturated": result.is_saturated,
        "utilisation": asdict(result.utilisation),
        "gpu_utilization": result.utilisation.busy,
        "gpu_utilization_prefill": result.utilisation.prefill,
        "gpu_utilization_decode": result.utilisation.decode,
        "median_queued_ms": result.queued.percentile(50) * 1e3 if result.queued.count else None,
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preemptions,
        "report": report_section(result.summary, result.timeline, result.steps),
    }
