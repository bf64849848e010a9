"""Runs steps from tapes: a shape of steps that keeps coming is recorded once, and played from then
on.

A step of one decode is a thousand small calls, and Python takes longer between them than a CPU does
for some of them. Unlike CUDA graphs, tapes need no padding and no memory of their own, so steps
with prefill chunks have them too.

    step of (tokens, rows, kept)    the first: as they come    then one: recorded    then: played
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.input_batch import InputBatch
from deployments.execution.model_forward import ModelForward
from deployments.execution.native.compiler import CannotCompile
from deployments.execution.step_runner import EagerRunner, StepRunner
from deployments.execution.tape.player import Tape, TapeRecorder
from deployments.execution.tape.watch import CannotRecord

logger = logging.getLogger(__name__)

NUM_PLAIN = 8
"""Steps of a shape before it is recorded. Recording takes about as long as tapes save in so many
steps of a small model, so no shape costs more than twice what it would have at best.
"""
MAX_SHAPES = 256
"""Whose tapes are kept, the last ones used; a tape of a hundred layers takes a few megabytes."""


@runtime_checkable
class TapePlans(Protocol):
    """What a backend offers whose plans can stand in for each other on a tape."""

    def tensors_of(self, plan: Any) -> Sequence[Tensor]:
        """All in which plans of as many tokens and rows differ; their sizes may differ too, since
        only kernels read them.
        """
        ...


class TapeRunner:
    """Plays steps.

    Args:
        forward: of the model.
        plans: the backend of `forward`.
        recorder: makes the tapes.
    """

    def __init__(self, forward: ModelForward, plans: TapePlans, recorder: TapeRecorder) -> None:
        self._forward = forward
        self._plans = plans
        self._recorder: TapeRecorder | None = recorder
        self._eager = EagerRunner(forward)
        # Of a shape that has none yet, how often it was seen.
        self._tapes: OrderedDict[tuple[int, int, int], Tape | int] = OrderedDict()

    def prepare(self) -> None:
        """See StepRunner: which shapes will come is not known yet."""

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        return 0

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        if self._recorder is None:
            return self._eager.run(batch, plan)
        shape = (len(batch.input_ids), len(batch.rows), len(batch.logits_indices))
        tape = self._tapes.setdefault(shape, 0)
        self._tapes.move_to_end(shape)
        if len(self._tapes) > MAX_SHAPES:
            self._tapes.popitem(last=False)
        if isinstance(tape, int) and tape < NUM_PLAIN:
            self._tapes[shape] = tape + 1
            return self._eager.run(batch, plan)
        inputs = (
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.logits_indices,
            *self._plans.tensors_of(plan),
        )
        if isinstance(tape, Tape):
            return tape.play(inputs)
        try:
            self._tapes[shape], logits = self._recorder.record(
                lambda: self._eager.run(batch, plan), inputs
            )
        except CannotRecord as error:
            logger.info("steps run through Python, which is slower for a few tokens: %s", error)
            self._recorder = None
            self._tapes.clear()
            return self._eager.run(batch, plan)
        return logits


def choose_tapes(
    may_tape: bool, cache: Path, plans: object
) -> Callable[[ModelForward], StepRunner]:
    """Makes the runner of a model's forward on a CPU: from tapes where there can be some.

    Args:
        may_tape: as configured.
        cache: where the library is kept.
        plans: the backend of the forward.
    """
    if not may_tape or not isinstance(plans, TapePlans):
        return EagerRunner
    try:
        recorder = TapeRecorder.compiled(cache)
    except (CannotCompile, OSError) as error:
        logger.warning("steps run through Python, which is slower for a few tokens: %s", error)
        return EagerRunner
    return lambda forward: TapeRunner(forward, plans, recorder)
