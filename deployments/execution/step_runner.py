"""Who runs the model's part of a step: the plain forward, or a recording of it that replays.

A decode step of a few rows is hundreds of small kernels; launching them one by one from Python
takes longer than the GPU needs for them. A CUDA graph launches all at once, but only with the same
shapes in the same memory. So steps of decodes alone are padded to a few sizes:

    3 decodes, size 4      input_ids  [ a9 | b4 | c7 | 0 ]     the last row stands for nobody: it
                           slots      [ 57 | 20 | 41 | 0 ]     reads and writes the null block
    static inputs of the graph of size 4 ◄── copied, then replayed ──► static logits [4, vocab]

Steps with prefill chunks run plainly: the GPU is busy for longer than their launches take.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.device_memory import is_out_of_memory
from deployments.execution.input_batch import InputBatch
from deployments.execution.model_forward import ModelForward
from deployments.execution.static_plans import StaticPlans, StaticShape

logger = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
"""Runs a recording again over what its inputs now hold; returns the same tensor each time."""


class StepRunner(Protocol):
    """Runs a step's forward."""

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """How many rows this step is to be padded to; 0: as it is."""
        ...

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        """The logits at `batch.logits_indices`, [num_kept, vocab_size]; good until the next
        call.
        """
        ...


class EagerRunner:
    """Runs each step as it comes."""

    def __init__(self, forward: ModelForward) -> None:
        self._forward = forward

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        return 0

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        return self._forward.compute(
            batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices, plan
        )


class Recorder(Protocol):
    """Records what a computation asks of the device."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Run it, and return what runs it again in the same memory.

        Raises:
            RuntimeError: it does something that cannot be recorded.
        """
        ...


class CudaGraphRecorder:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """See Recorder."""
        # Before, so that kernels are compiled and libraries have their workspaces.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def graph_sizes(max_num_rows: int) -> tuple[int, ...]:
    """The sizes to pad to: 1, 2, 4, then multiples of 8, up to the most rows of a step."""
    sizes = {1, 2, 4, *range(8, max_num_rows, 8), max_num_rows}
    return tuple(sorted(size for size in sizes if size <= max_num_rows))


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph and all the memory it reads, which nobody else keeps."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    which: Tensor
    plan: Any
    replay: Replay


class GraphedRunner:
    """Replays steps of decodes; the first of a size and kind is recorded, which takes a moment.

    Args:
        forward: of the model.
        plans: the backend of `forward`.
        recorder: makes the recordings.
        largest: the most rows that a step may have, and blocks that a row may have.
    """

    def __init__(
        self,
        forward: ModelForward,
        plans: StaticPlans,
        recorder: Recorder,
        largest: StaticShape,
    ) -> None:
        self._forward = forward
        self._plans = plans
        self._recorder = recorder
        self._largest = largest
        self._sizes = graph_sizes(largest.num_rows)
        self._eager = EagerRunner(forward)
        self._recordings: dict[tuple[int, int], _Recording] = {}

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        num_rows = len(scheduled)
        is_eager = not self._sizes or not 0 < num_rows <= self._sizes[-1]
        if is_eager or any(row.num_scheduled_tokens > 1 for row in scheduled):
            return 0
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        num_rows = len(batch.rows)
        if batch.num_decodes < num_rows or num_rows not in self._sizes:
            return self._eager.run(batch, plan)
        recording = self._find_or_record(num_rows, self._plans.plan_kind(plan))
        if recording is None:
            return self._eager.run(batch, plan)
        recording.input_ids.copy_(batch.input_ids)
        recording.positions.copy_(batch.positions)
        recording.slots.copy_(batch.slot_mapping)
        self._plans.fill_static(recording.plan, plan)
        return recording.replay()[batch.logits_indices]

    def _find_or_record(self, num_rows: int, kind: int) -> _Recording | None:
        """None: nothing can be recorded, and from now on nothing is. Out of memory is no such case:
        the step is made smaller and run again.
        """
        key = (num_rows, kind)
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(num_rows, kind)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                logger.warning("decodes run without CUDA graphs, which is slower: %s", error)
                self._sizes = ()
                self._recordings.clear()
                return None
        return self._recordings[key]

    def _record(self, num_rows: int, kind: int) -> _Recording:
        plan = self._plans.make_static(replace(self._largest, num_rows=num_rows, kind=kind))
        # Every row the null block's: what recording computes, nobody reads.
        packed = torch.zeros(3, num_rows, dtype=torch.int64, device=self._forward.device)
        which = torch.arange(num_rows, device=self._forward.device)
        input_ids, positions, slots = packed.unbind()
        replay = self._recorder.record(
            lambda: self._forward.compute(input_ids, positions, slots, which, plan)
        )
        return _Recording(input_ids, positions, slots, which, plan, replay)


def choose_graphs(
    cuda_graphs: str, plans: object, device: torch.device, largest: StaticShape
) -> Callable[[ModelForward], StepRunner]:
    """Makes the runner of a model's forward on a GPU: from graphs if the backend has plans for
    them.

    Args:
        cuda_graphs: as configured, "auto" or "off".
        plans: the backend of the forward.
        largest: see GraphedRunner.
    """
    if cuda_graphs == "off" or device.type != "cuda" or not isinstance(plans, StaticPlans):
        return EagerRunner
    recorder = CudaGraphRecorder(device)
    return lambda forward: GraphedRunner(forward, plans, recorder, largest)
