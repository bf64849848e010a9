"""The simulator beside a measured run: the requests of a published run of vLLM 0.19, simulated by
the cost model of the GPU it ran on.

vLLM serves first come, first served. The service's scheduler does the same if each request has a
priority class of its own, the earlier the more urgent, and none may pass another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import numpy as np

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.converters import find_trace
from loadtest.measures import result_json
from loadtest.simulate import FleetConfig, SimResult, simulate
from loadtest.studies.results import add_result_argument, tell_and_keep
from loadtest.trace import TraceRequest

WORKLOAD = "groundtruth/sharegpt300_sps10_lengths_and_prefix16.jsonl"
HASH_BLOCK_TOKENS = 16  # of this workload alone


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A published run: which file, and the settings it ran with.

    `num_blocks` None: the run does not tell; memory never ran short in it.
    """

    name: str
    cost_model: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None

    @property
    def path(self) -> str:
        """Of its requests, within the folder of traces."""
        return f"groundtruth/vllm0.19_{self.name}_Llama-3.1-8B.requests.jsonl"


RUNS = (
    MeasuredRun("RTX4090", "rtx4090-llama3-8b", 256, 2048, 2588),
    MeasuredRun("RTXPRO6000", "rtxpro6000-llama3-8b", 128, 2048, None),
)


def read_workload() -> list[TraceRequest]:
    """The requests as they were sent, each in a class of its own."""
    lines = find_trace(WORKLOAD).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        TraceRequest(
            row["timestamp"] / 1e3,
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"]),
            priority=index,
        )
        for index, row in enumerate(rows)
    ]


def read_measured(run: MeasuredRun) -> dict[str, float]:
    """What was measured, in milliseconds, under the names of our results."""
    lines = find_trace(run.path).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    ttft = [row["first_token_ts"] - row["queued_ts"] for row in rows]
    tpot = [
        (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1) for row in rows
    ]
    e2e = [row["last_token_ts"] - row["queued_ts"] for row in rows]
    seconds = {
        "mean_ttft_ms": mean(ttft),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "mean_tpot_ms": mean(tpot),
        "mean_e2el_ms": mean(e2e),
    }
    return {name: value * 1e3 for name, value in seconds.items()}


def simulate_run(
    workload: Sequence[TraceRequest], run: MeasuredRun, *, enable_prefix_caching: bool
) -> SimResult:
    """The same requests on the same GPU, simulated."""
    return simulate(
        workload,
        FleetConfig(
            CostModel.load(run.cost_model),
            scheduler=SchedulerConfig(
                max_num_seqs=run.max_num_seqs,
                max_num_batched_tokens=run.max_num_batched_tokens,
                chunk_size=run.max_num_batched_tokens,
                overlap_ratio=0.0,
                max_num_passes=0,
            ),
            cache=CacheConfig(
                num_blocks=run.num_blocks, enable_prefix_caching=enable_prefix_caching
            ),
            hash_block_tokens=HASH_BLOCK_TOKENS,
        ),
    )


def compare(run: MeasuredRun, *, enable_prefix_caching: bool) -> dict[str, Any]:
    """Simulated figures with their errors in percent of what was measured."""
    result = simulate_run(read_workload(), run, enable_prefix_caching=enable_prefix_caching)
    # Its priorities stand for the order of arrival, and mean nothing by themselves.
    simulated = result_json(replace(result.summary, by_priority={}))
    measured = read_measured(run)
    return {
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preemptions,
        "measured": {name: round(value, 2) for name, value in measured.items()},
        "simulated": {name: round(simulated[name], 2) for name in measured},
        "error_pct": {
            name: round((simulated[name] / value - 1.0) * 100, 2)
            for name, value in measured.items()
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this study."""
    add_result_argument(parser, "fidelity")


def main(arguments: argparse.Namespace) -> int:
    """Compare all runs, with and without the prefix cache, and keep the result."""
    figures = {
        f"{run.name}, prefix cache {'on' if is_on else 'off'}": compare(
            run, enable_prefix_caching=is_on
        )
        for run in RUNS
        for is_on in (False, True)
    }
    tell_and_keep(arguments.save_result, figures)
    return 0
