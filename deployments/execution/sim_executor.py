"""An executor that computes nothing: a step costs the time that a cost model says, on a virtual
clock.

Owns the step's shape as the cost model wants it. All else of an engine over it is real.
"""

from __future__ import annotations

from typing import Protocol

from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.execution.cost_model import CostModel, StepShape

SAMPLED_TOKEN_ID = 0
"""What every request gets; a simulated prompt must not hold it, or answers would be found in the
prefix cache where a real model's are not."""


class AdvancingClock(Protocol):
    """A clock that moves when told to."""

    def advance(self, duration_s: float) -> None:
        """Let so many seconds pass."""
        ...


def step_shape(output: SchedulerOutput) -> StepShape:
    """What the time of a scheduled step depends on."""
    scheduled, num_decodes = output.scheduled, output.num_decode_tokens
    contexts = [row.num_computed_tokens + 1 for row in scheduled[:num_decodes]]
    context = sum(contexts)
    prefills = [
        (row.num_scheduled_tokens, row.num_computed_tokens) for row in scheduled[num_decodes:]
    ]
    skew = num_decodes * max(contexts, default=0) - context
    return StepShape(num_decodes, context, tuple(prefills), skew)


class SimExecutor:
    """Takes the time of a GPU and answers with the same token always.

    Args:
        cost_model: of the GPU it stands for.
        limits: of the model it stands for; without end-of-sequence tokens, so that each request
            runs for its max_tokens.
        clock: the engine's.
    """

    def __init__(self, cost_model: CostModel, limits: ModelLimits, clock: AdvancingClock) -> None:
        self._cost_model = cost_model
        self._limits = limits
        self._clock = clock

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Let the step's time pass."""
        self._clock.advance(self._cost_model.step_s(step_shape(output)))
        sampling = [row.request.request_id for row in output.scheduled if row.samples_token]
        return ModelOutput(dict.fromkeys(sampling, SAMPLED_TOKEN_ID))
