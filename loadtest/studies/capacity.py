"""What chunking is worth: the highest rate at which each way of batching keeps its pauses short.

The set-up is that of Sarathi-Serve (Agrawal et al., OSDI'24, section 5): Poisson arrivals, lengths
of shared chats; a rate is served if the P99 of the time between tokens is within the SLO and
requests wait for at most 2 s (median) before they start. Batches of 128 requests, of 16 for those
that reserve memory for the longest answer. Each seed draws other lengths and arrivals.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.arrivals import arriving_at, scale_times
from loadtest.capacity import SearchBounds, Trial, find_capacity
from loadtest.converters import load_trace
from loadtest.policies import POLICIES
from loadtest.simulate import FleetConfig, simulate
from loadtest.studies.results import add_result_argument, tell, tell_and_keep
from loadtest.trace import TraceRequest

LENGTHS = "sarathi_sharegpt_8k_lengths.csv"
MAX_MODEL_LEN = 8192 + 1024  # longest prompt and longest answer of these lengths
BOUNDS = SearchBounds(start=2.0, lowest=0.1, highest=8.0, tolerance=0.025)
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


def measure(
    fleet: FleetConfig, workload: Sequence[TraceRequest], requests_per_s: float, setting: Setting
) -> Trial:
    """Serve the workload, whose rate is one a second, at another rate."""
    result = simulate(scale_times(workload, 1.0 / requests_per_s), fleet)
    p99_tbt_s = result.summary.distributions["itl"].percentile(99)
    delay_s = result.queued.percentile(50)
    tell(
        f"{fleet.policy} at {requests_per_s:.2f}/s: P99 TBT {p99_tbt_s:.3f} s, "
        f"median wait {delay_s:.2f} s"
    )
    return Trial(requests_per_s, p99_tbt_s <= setting.slo_tbt_s, delay_s)


def capacity_of(
    policy: str, cost_model: CostModel, setting: Setting, workload: Sequence[TraceRequest]
) -> float:
    """Requests per second that one GPU serves within a setting."""
    fleet = fleet_for(policy, cost_model, setting)
    return find_capacity(lambda rate: measure(fleet, workload, rate, setting), BOUNDS).rate


def study(
    cost_model: CostModel, setting: Setting, workloads: Mapping[int, Sequence[TraceRequest]]
) -> dict[str, Any]:
    """Capacities of all policies in one setting, by the seed of the workload, and what chunking
    gains on each: the geometric mean over the seeds.
    """
    rates = {
        seed: {policy: capacity_of(policy, cost_model, setting, workload) for policy in POLICIES}
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
