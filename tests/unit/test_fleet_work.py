"""Where the search for a fleet begins."""

from __future__ import annotations

import pytest

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import CostModel
from loadtest.fleet_work import find_least_replicas, full_step_s
from loadtest.simulate import FleetConfig, simulate
from loadtest.trace import TraceRequest


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(2000, 2), (100, 200), (800, 100)])
def test_the_start_is_below_what_a_simulated_fleet_needs_and_not_far(
    num_prompt: int, num_answer: int
) -> None:
    """The search starts above the answer or at one GPU, and takes many more runs."""
    cost_model = CostModel.load("h100-llama3-8b")
    trace = [TraceRequest(at * 0.01, num_prompt, num_answer) for at in range(300)]
    least = find_least_replicas(trace, cost_model, max_num_seqs=256)
    scheduler = SchedulerConfig(
        chunk_size=2048, overlap_ratio=0.0, max_num_batched_tokens=2304, max_num_waiting=10**6
    )
    cache = CacheConfig(enable_prefix_caching=False)
    # Busy from the first arrival to the last, so that what it does in that time is all it can.
    result = simulate(trace, FleetConfig(cost_model, 1, scheduler, cache))
    needed = result.duration_s / 3.0
    assert 0.25 * needed < least <= needed + 1


def test_a_trace_that_comes_at_once_starts_with_one_gpu() -> None:
    """It ends in a division by zero."""
    trace = [TraceRequest(1.0, 100, 2)] * 3
    assert find_least_replicas(trace, CostModel.load("h100-llama3-8b"), 256) == 1


def test_a_full_step_is_longer_the_larger_it_is() -> None:
    """Settings are tried in the wrong order."""
    cost_model = CostModel.load("h100-llama3-8b")
    assert full_step_s(cost_model, 512) < full_step_s(cost_model, 2048) < 0.2
