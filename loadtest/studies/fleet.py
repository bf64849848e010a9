"""How many GPUs serve 1,000 requests/s of conversations, how busy they are in each phase, and what
a burst of coding requests does to that fleet.

Arrivals are Poisson, as those of many users who do not know of each other; lengths are drawn from
the trace. The burst is the busiest second of the coding trace, at its own pace.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any

from deployments.config import SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.arrivals import arriving_at
from loadtest.converters import load_trace
from loadtest.fleet_work import find_least_replicas
from loadtest.measures import RequestRecord, result_json
from loadtest.planning import PlanningError, Replicas, find_fewest
from loadtest.simulate import FleetConfig, SimResult, simulate
from loadtest.studies.results import add_result_argument, tell, tell_and_keep
from loadtest.trace import TraceRequest

CONVERSATIONS = "azure_llm_2023_conv.csv"
CODE = "azure_llm_2023_code.csv"
NUM_TIMED_REPLICAS = 64
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Target:
    """What the fleet has to do."""

    requests_per_s: float
    p99_ttft_s: float


def conversation_mix(
    lengths: Sequence[TraceRequest], requests_per_s: float, num_requests: int, seed: int
) -> list[TraceRequest]:
    """Requests of these lengths, drawn at random, with Poisson arrivals."""
    drawn = random.Random(seed).choices(lengths, k=num_requests)
    return arriving_at(drawn, requests_per_s, seed=seed)


def find_busiest(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests of the whole second with the most of them, seconds counted from the trace's
    start; the first of them comes at 0 s.
    """
    by_second: defaultdict[int, list[TraceRequest]] = defaultdict(list)
    for traced in trace:
        by_second[int(traced.timestamp_s)].append(traced)
    busiest = max(by_second.values(), key=len)
    start_s = busiest[0].timestamp_s
    return [replace(traced, timestamp_s=traced.timestamp_s - start_s) for traced in busiest]


def fleet_of(cost_model: CostModel, num_replicas: int) -> FleetConfig:
    """So many GPUs; chunks as large as most prompts, for that serves the most within 300 ms."""
    return FleetConfig(
        cost_model,
        num_replicas,
        SchedulerConfig(
            chunk_size=2048,
            overlap_ratio=0.0,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=2304,
        ),
    )


def meets(result: SimResult, target: Target) -> bool:
    """Whether all were served, in time, without a growing queue."""
    figures = result_json(result.summary)
    is_in_time = bool(figures["p99_ttft_ms"] <= target.p99_ttft_s * 1e3)
    return is_in_time and not result.is_saturated and not figures["errors"]


def describe(result: SimResult) -> dict[str, Any]:
    """The figures of a run."""
    figures = result_json(result.summary)
    names = ("median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")
    return {
        "num_requests": figures["completed"],
        **{name: round(figures[name], 1) for name in names},
        "utilisation_pct": {
            name: round(share * 100, 1) for name, share in asdict(result.utilisation).items()
        },
        "num_preemptions": result.num_preemptions,
    }


def drain(
    burst: Sequence[TraceRequest], background: Sequence[TraceRequest], fleet: FleetConfig
) -> dict[str, float]:
    """What a burst sees in the middle of the background (of nothing, if that is empty): from its
    first arrival to the last of its first tokens, and to its last end; and its slowest first token.
    """
    middle_s = background[-1].timestamp_s / 2 if background else 0.0
    late = [replace(t, timestamp_s=t.timestamp_s + middle_s) for t in burst]
    moments = {traced.timestamp_s for traced in late}
    ended: list[RequestRecord] = []

    def take(record: RequestRecord) -> None:
        if record.intended_s in moments and record.error is None:
            ended.append(record)

    simulate([*background, *late], fleet, on_record=take)
    return {
        "num_served": len(ended),
        "all_first_tokens_after_s": round(max(r.token_times_s[0] for r in ended) - middle_s, 3),
        "all_ended_after_s": round(max(r.end_s for r in ended) - middle_s, 3),
        "slowest_first_token_s": round(max(r.ttft_s or 0.0 for r in ended), 3),
    }


def time_simulation(trace: Sequence[TraceRequest], fleet: FleetConfig) -> dict[str, float]:
    """How long a run takes of one core of this machine, beside the time it simulates. Processor
    time, for others may want the core as well.
    """
    began_s = process_time()
    result = simulate(trace, fleet)
    cpu_s = process_time() - began_s
    return {
        "num_replicas": fleet.num_replicas,
        "arrivals_s": round(trace[-1].timestamp_s, 1),
        "simulated_s": round(result.duration_s, 1),
        "cpu_s": round(cpu_s, 1),
        "times_real_time": round(result.duration_s / cpu_s, 2),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this study."""
    add_result_argument(parser, "fleet")
    parser.add_argument("--cost-model", default="h100-llama3-8b")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--p99-ttft-ms", type=float, default=300.0)
    parser.add_argument("--num-requests", type=int, default=60_000)
    parser.add_argument("--most", type=int, default=64, help="GPUs, at most")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")


def main(arguments: argparse.Namespace) -> int:
    """Search the fleet, send the burst, and keep the result."""
    cost_model = CostModel.load(arguments.cost_model)
    target = Target(arguments.rate, arguments.p99_ttft_ms / 1e3)
    trace = conversation_mix(
        load_trace(CONVERSATIONS), target.requests_per_s, arguments.num_requests, arguments.seed
    )
    # A third of the requests finds the size; all of them may need a few more, for a queue that
    # hardly grows takes its time.
    sample = trace[: len(trace) // 3]

    def is_enough(num_gpus: int) -> bool:
        result = simulate(sample, fleet_of(cost_model, num_gpus))
        tell(f"{num_gpus} GPUs: P99 TTFT {result_json(result.summary)['p99_ttft_ms']:.0f} ms")
        return meets(result, target)

    least = find_least_replicas(sample, cost_model, MAX_NUM_SEQS)
    num_gpus = find_fewest(is_enough, Replicas(1, arguments.most, min(least, arguments.most)))
    if num_gpus is None:
        raise PlanningError(f"even {arguments.most} GPUs do not meet the target: raise --most")
    while not meets(result := simulate(trace, fleet_of(cost_model, num_gpus)), target):
        num_gpus += 1
    fleet = fleet_of(cost_model, num_gpus)
    burst = find_busiest(load_trace(CODE))
    figures = {
        "cost_model": cost_model.name,
        "lengths": CONVERSATIONS,
        "target": asdict(target),
        "seed": arguments.seed,
        "num_gpus": num_gpus,
        **describe(result),
        "speed": time_simulation(trace, fleet_of(cost_model, NUM_TIMED_REPLICAS)),
        "burst": {
            "num_requests": len(burst),
            "num_prompt_tokens": sum(traced.input_length for traced in burst),
            "on_the_idle_fleet": drain(burst, [], fleet),
            "beside_the_conversations": drain(burst, sample, fleet),
        },
    }
    tell_and_keep(arguments.save_result, figures)
    return 0
