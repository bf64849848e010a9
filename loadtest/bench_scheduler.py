"""The scheduler's own cost per step: the real core over an executor that costs nothing."""

from __future__ import annotations

import statistics

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.protocol import GenerateRequest, SamplingParams

NUM_STEPS = 200
NUM_PROMPT_TOKENS = 512
_BLOCK_SIZE = 16


class InstantExecutor:
    """Samples the same token for everybody, at once.

    Args:
        limits: of the model it stands for.
    """

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        return ModelOutput(
            {row.request.request_id: 5 for row in output.scheduled if row.samples_token}
        )


def measure_scheduler(num_running: int) -> dict[str, float]:
    """Milliseconds of schedule and update per step while `num_running` requests decode."""
    tokens_each = NUM_PROMPT_TOKENS + NUM_STEPS + _BLOCK_SIZE
    num_blocks = 2 + num_running * (tokens_each // _BLOCK_SIZE + 2)
    limits = ModelLimits(4096, 1000, num_blocks, _BLOCK_SIZE, frozenset())
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * 600)
    engine = Engine.build(config, CacheConfig(), InstantExecutor(limits), WallClock())
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0)
    for index in range(num_running):
        prompt = tuple((index * 31 + place) % 1000 for place in range(NUM_PROMPT_TOKENS))
        engine.add(GenerateRequest(f"bench-{index}", prompt, params))
    while engine.has_requests:
        engine.step()
    costs_ms = [
        (step.schedule_s + step.update_s) * 1e3
        for step in engine.step_log.steps
        if step.num_decode_tokens == num_running
    ]
    return {
        "min": round(min(costs_ms), 3),
        "median": round(statistics.median(costs_ms), 3),
        "p99": round(sorted(costs_ms)[int(len(costs_ms) * 0.99)], 3),
        "us_per_running_request": round(statistics.median(costs_ms) * 1e3 / num_running, 2),
    }
