"""The scheduler's own cost per step: the real core over an executor that costs nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.engine.stats import StepStats
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


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Microseconds of a step in which all requests decode, means over the steps.

    The means are of interest, not the medians: in a step some requests begin a block, and that is
    part of what they cost.
    """

    schedule_us: float
    update_us: float
    log_us: float
    """Recording the step once it is booked."""
    p99_us: float
    """Of schedule and update together."""

    @property
    def us_per_step(self) -> float:
        """Schedule and update."""
        return self.schedule_us + self.update_us


def measure_scheduler(num_running: int, num_steps: int = NUM_STEPS) -> SchedulerCost:
    """What a step of `num_running` decodes costs beside the model. Their lengths differ, so that
    they do not all begin a block in the same step.
    """
    engine = _running_engine(num_running, num_steps)
    steps: list[StepStats] = []
    logs_s: list[float] = []
    while engine.has_requests:
        started_s = time.perf_counter()
        engine.step()
        taken_s = time.perf_counter() - started_s
        step = engine.step_log.last
        if step.num_decode_tokens == num_running and step.index > num_steps // 10:
            steps.append(step)
            logs_s.append(taken_s - step.schedule_s - step.execute_s - step.update_s)
    both_us = sorted((step.schedule_s + step.update_s) * 1e6 for step in steps)
    return SchedulerCost(
        schedule_us=statistics.fmean(step.schedule_s for step in steps) * 1e6,
        update_us=statistics.fmean(step.update_s for step in steps) * 1e6,
        log_us=statistics.fmean(logs_s) * 1e6,
        p99_us=both_us[int(len(both_us) * 0.99)],
    )


def _running_engine(num_running: int, num_steps: int) -> Engine:
    longest = NUM_PROMPT_TOKENS + _BLOCK_SIZE
    num_blocks = 2 + num_running * ((longest + num_steps) // _BLOCK_SIZE + 2)
    limits = ModelLimits(4096, 1000, num_blocks, _BLOCK_SIZE, frozenset())
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=num_running * longest)
    engine = Engine.build(config, CacheConfig(), InstantExecutor(limits), WallClock())
    params = SamplingParams(max_tokens=num_steps, temperature=0.0)
    for index in range(num_running):
        num_tokens = NUM_PROMPT_TOKENS + index % _BLOCK_SIZE
        prompt = tuple((index * 31 + place) % 1000 for place in range(num_tokens))
        engine.add(GenerateRequest(f"bench-{index}", prompt, params))
    return engine
