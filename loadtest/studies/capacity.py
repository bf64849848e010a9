"""What chunking is worth: the highest rate at which each way of batching keeps its pauses short.

The set-up is that of Sarathi-Serve (Agrawal et al., OSDI'24, section 5): Poisson arrivals, lengths
of shared chats; a rate is served if the P99 of the time between tokens is within the SLO and
requests wait for at most 2 s (median) before they start. Batches of 128 requests, of 16 for those
that reserve memory for the longest answer. Each seed draws other lengths and arrivals.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.arrivals import arriving_at, scale_times
from loadtest.converters import load_trace
from loadtest.measures import result_json
from loadtest.policies import POLICIES
from loadtest.simulate import FleetConfig, simulate
from loadtest.studies.results import add_result_argument, tell, tell_and_keep
from loadtest.trace import TraceRequest

LENGTHS = "sarathi_sharegpt_8k_lengths.csv"
MAX_QUEUED_S = 2.0
MAX_MODEL_LEN = 8192 + 1024  # longest prompt and longest answer of these lengths
TOLERANCE = 0.025
LARGE_BATCH, SMALL_BATCH = 128, 16
UNLIMITED_QUEUE = 1_000_000


@dataclass(frozen=True, slots=True)
class Setting:
    """A bound on the time between tokens, and the token budget that chunking keeps it with."""

    slo_tbt_s: float
    token_budget: int


STRICT, RELAXED = Setting(0.1, 512), Setting(0.5, 2048)


def sample_workload(
    lengths: Sequence[TraceRequest], num_requests: int, seed: int
) -> list[TraceRequest]:
    """So many of the lengths, in random order, with Poisson arrivals of one a second."""
    sampled = random.Random(seed).sample(list(lengths), num_requests)
    return arriving_at(sampled, 1.0, seed=seed)


def fleet_for(policy: str, cost_model: CostModel, setting: Setting) -> FleetConfig:
    """One GPU that batches in this way."""
    batch = SMALL_BATCH if policy in ("orca", "static") else LARGE_BATCH
    budget = setting.token_budget if policy == "chunked" else MAX_MODEL_LEN
    return FleetConfig(
        cost_model,
        scheduler=SchedulerConfig(
            chunk_size=budget,
            overlap_ratio=0.0,
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
            max_num_waiting=UNLIMITED_QUEUE,
        ),
        cache=CacheConfig(enable_prefix_caching=False),
        policy=policy,
        max_model_len=MAX_MODEL_LEN,
    )


@dataclass(frozen=True, slots=True)
class Pauses:
    """What decides whether a rate is served."""

    p99_tbt_s: float
    median_queued_s: float

    def is_within(self, setting: Setting) -> bool:
        """Whether the rate is served."""
        return self.p99_tbt_s <= setting.slo_tbt_s and self.median_queued_s <= MAX_QUEUED_S


def measure(fleet: FleetConfig, workload: Sequence[TraceRequest], requests_per_s: float) -> Pauses:
    """Serve the workload, whose rate is one a second, at another rate."""
    result = simulate(scale_times(workload, 1.0 / requests_per_s), fleet)
    p99_tbt_s = result_json(result.summary)["p99_itl_ms"] / 1e3
    return Pauses(p99_tbt_s, result.queued.percentile(50))


def find_highest_rate(is_served: Callable[[float], bool], most: float) -> float:
    """The highest rate that is served, to TOLERANCE of itself, by bisection below `most`; 0 if
    hardly any is.
    """
    low, high = 0.0, most
    while high - low > max(TOLERANCE * low, TOLERANCE**2 * most):
        middle = (low + high) / 2
        if is_served(middle):
            low = middle
        else:
            high = middle
    return low


def find_capacity(
    policy: str, cost_model: CostModel, setting: Setting, workload: Sequence[TraceRequest]
) -> float:
    """Requests per second that one GPU serves within a setting."""
    fleet = fleet_for(policy, cost_model, setting)

    def is_served(rate: float) -> bool:
        pauses = measure(fleet, workload, rate)
        tell(
            f"{policy} at {rate:.2f}/s: P99 TBT {pauses.p99_tbt_s:.3f} s, "
            f"median wait {pauses.median_queued_s:.2f} s"
        )
        return pauses.is_within(setting)

    return find_highest_rate(is_served, most=8.0)


def study(
    cost_model: CostModel, setting: Setting, workloads: Mapping[int, Sequence[TraceRequest]]
) -> dict[str, Any]:
    """Capacities of all policies in one setting, by the seed of the workload, and what chunking
    gains on each: the geometric mean over the seeds.
    """
    rates = {
        seed: {policy: find_capacity(policy, cost_model, setting, workload) for policy in POLICIES}
        for seed, workload in workloads.items()
    }
    gains = {
        policy: geometric_mean([each["chunked"] / each[policy] for each in rates.values()])
        for policy in POLICIES
        if policy != "chunked" and all(each[policy] for each in rates.values())
    }
    return {
        "requests_per_s": {
            f"seed {seed}": {policy: round(rate, 3) for policy, rate in each.items()}
            for seed, each in rates.items()
        },
        "chunked_gain": {policy: round(gain, 2) for policy, gain in gains.items()},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this study."""
    add_result_argument(parser, "capacity")
    parser.add_argument("--cost-model", default="a100-llama3-8b")
    parser.add_argument("--num-requests", type=int, default=2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def main(arguments: argparse.Namespace) -> int:
    """Search all capacities and keep the result."""
    lengths = load_trace(LENGTHS)
    cost_model = CostModel.load(arguments.cost_model)
    num_requests = arguments.num_requests
    workloads = {seed: sample_workload(lengths, num_requests, seed) for seed in arguments.seeds}
    figures: dict[str, Any] = {
        f"P99 TBT {setting.slo_tbt_s:g} s, budget {setting.token_budget}": study(
            cost_model, setting, workloads
        )
        for setting in (STRICT, RELAXED)
    }
    made_of = {"cost_model": cost_model.name, "lengths": LENGTHS, "num_requests": num_requests}
    tell_and_keep(arguments.save_result, made_of | figures)
    return 0
