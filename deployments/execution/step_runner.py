"""Who runs the model's part of a step: the plain forward, or a recording of it that replays.

A decode step of a few rows is hundreds of small kernels; launching them one by one from Python
takes longer than the GPU needs for them. A CUDA graph launches all at once, but only with the same
shapes in the same memory. So steps of decodes alone are padded to a few sizes:

    3 decodes, size 4      input_ids  [ a9 | b4 | c7 | 0 ]     the last row stands for nobody: it
                           slots      [ 57 | 20 | 41 | 0 ]     reads and writes the null block
    static inputs of the graph of size 4 ◄── copied, then replayed ──► static logits [4, vocab]

All sizes are recorded when the KV cache lies where it stays, before the first step. They take of
what the reserve holds back from the cache; what the largest step needs is left to it:

    device   | weights | KV blocks | graphs, from the largest on | largest step |

Steps with prefill chunks run plainly: the GPU is busy for longer than their launches take.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.device_memory import is_out_of_memory, release_unused
from deployments.execution.graph_recorder import CudaGraphRecorder, Recorder, Replay
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import num_free_bytes
from deployments.execution.model_forward import ModelForward
from deployments.execution.static_plans import StaticPlans, StaticShape

logger = logging.getLogger(__name__)

_GB = 1024**3


class StepRunner(Protocol):
    """Runs a step's forward."""

    def prepare(self) -> None:
        """Do ahead what can be done before the first step; once, where the forward's memory lies
        for good.
        """
        ...

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

    def prepare(self) -> None:
        """See StepRunner: nothing."""

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        return 0

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        return self._forward.compute(
            batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices, plan
        )


def graph_sizes(max_num_rows: int) -> tuple[int, ...]:
    """The sizes to pad to: 1, 2, 4, then multiples of 8, up to the most rows of a step."""
    sizes = {1, 2, 4, *range(8, max_num_rows, 8), max_num_rows}
    return tuple(sorted(size for size in sizes if size <= max_num_rows))


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that recordings may take.

    Args:
        find_num_free: bytes of the device that are free now.
        num_step_bytes: of these, what the largest step needs.
    """

    find_num_free: Callable[[], int]
    num_step_bytes: int

    def check(self) -> None:
        """See to it that the largest step still fits.

        Raises:
            MemoryError: it does not.
        """
        num_free = self.find_num_free()
        if num_free < self.num_step_bytes:
            raise MemoryError(
                f"{num_free / _GB:.2f} GB would be left to the largest step, which takes "
                f"{self.num_step_bytes / _GB:.2f}"
            )


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph and all the memory that it reads and writes, which nobody else keeps."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    which: Tensor
    plan: Any
    logits: Tensor
    replay: Replay


class GraphedRunner:
    """Replays steps of decodes of every size and kind that `prepare` could record; what it could
    not, runs plainly.

    Args:
        forward: of the model.
        plans: the backend of `forward`.
        recorder: makes the recordings.
        largest: the most rows that a step may have, and blocks that a row may have.
        room: what recordings may take.
    """

    def __init__(
        self,
        forward: ModelForward,
        plans: StaticPlans,
        recorder: Recorder,
        largest: StaticShape,
        room: Room,
    ) -> None:
        self._forward = forward
        self._plans = plans
        self._recorder = recorder
        self._largest = largest
        self._room = room
        self._sizes = graph_sizes(largest.num_rows)
        self._eager = EagerRunner(forward)
        # By size, then by kind: a size has all of its kinds, or is not there.
        self._recordings: dict[int, dict[int, _Recording]] = {}

    def prepare(self) -> None:
        """Record all there is room for. A model that cannot be recorded is served all the same, and
        the log says so.
        """
        started_s = time.monotonic()
        release_unused(self._forward.device)
        num_free = self._room.find_num_free()
        try:
            self._record_all()
        except (RuntimeError, MemoryError) as error:
            self._give_up(error)
        # The error is gone, whose frames held what was half recorded.
        release_unused(self._forward.device)
        logger.info(
            "CUDA graphs of %d of %d sizes recorded in %.1f s; they take %.2f GB",
            len(self._recordings),
            len(self._sizes),
            time.monotonic() - started_s,
            (num_free - self._room.find_num_free()) / _GB,
        )

    def num_rows_of(self, scheduled: Sequence[ScheduledRequest]) -> int:
        num_rows = len(scheduled)
        is_eager = not 0 < num_rows <= self._sizes[-1]
        if is_eager or any(row.num_scheduled_tokens > 1 for row in scheduled):
            return 0
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        return size if size in self._recordings else 0

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        recording = self._find(batch, plan)
        if recording is None:
            return self._eager.run(batch, plan)
        recording.input_ids.copy_(batch.input_ids)
        recording.positions.copy_(batch.positions)
        recording.slots.copy_(batch.slot_mapping)
        self._plans.fill_static(recording.plan, plan)
        return recording.replay()[batch.logits_indices]

    def _find(self, batch: InputBatch, plan: Any) -> _Recording | None:
        """None: there is none of such a step."""
        num_rows = len(batch.rows)
        if batch.num_decodes < num_rows or num_rows not in self._recordings:
            return None
        return self._recordings[num_rows].get(self._plans.plan_kind(plan))

    def _record_all(self) -> None:
        """From the largest size, so that the smaller ones fit into memory that it used.

        Raises:
            MemoryError, RuntimeError: there is no more room, or the model cannot be recorded; what
                was recorded before stands.
        """
        # All leave their logits in one place. Each would keep one of its own: a row of them is
        # large, and all sizes together have thousands of rows.
        inputs = self._null_inputs(self._largest.num_rows)
        logits = self._forward.compute(*inputs, self._plans.make_static(self._largest))
        for num_rows in reversed(self._sizes):
            shape = replace(self._largest, num_rows=num_rows)
            recordings = {
                kind: self._record(replace(shape, kind=kind), logits[:num_rows])
                for kind in self._plans.plan_kinds(shape)
            }
            self._room.check()
            self._recordings[num_rows] = recordings

    def _record(self, shape: StaticShape, logits: Tensor) -> _Recording:
        input_ids, positions, slots, which = self._null_inputs(shape.num_rows)
        plan = self._plans.make_static(shape)
        replay = self._recorder.record(
            lambda: logits.copy_(self._forward.compute(input_ids, positions, slots, which, plan))
        )
        return _Recording(input_ids, positions, slots, which, plan, logits, replay)

    def _null_inputs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, positions, slots and the indices of all rows, each of the null block: what is
        computed of them, nobody reads.
        """
        device = self._forward.device
        input_ids, positions, slots = torch.zeros(
            3, num_rows, dtype=torch.int64, device=device
        ).unbind()
        return input_ids, positions, slots, torch.arange(num_rows, device=device)

    def _give_up(self, error: BaseException) -> None:
        """Say why not all is recorded. What was stays, unless the model cannot be recorded."""
        if is_out_of_memory(error):
            logger.warning(
                "%d of %d sizes of decodes run without CUDA graphs, which is slower: %s; raise "
                "scheduler.gpu_mem_reserve_gb, lower scheduler.max_num_seqs, or set "
                "execution.cuda_graphs to off",
                len(self._sizes) - len(self._recordings),
                len(self._sizes),
                _in_one_line(error),
            )
            return
        self._recordings.clear()
        logger.warning("decodes run without CUDA graphs, which is slower: %s", _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    """The first line of it and of those it came over: the end of a recording that failed raises an
    error of its own.
    """
    line = str(error).partition("\n")[0] or type(error).__name__
    before = error.__context__
    return line if before is None else f"{line} (after: {_in_one_line(before)})"


def choose_graphs(
    cuda_graphs: str,
    plans: object,
    device: torch.device,
    largest: StaticShape,
    num_step_bytes: int,
) -> Callable[[ModelForward], StepRunner]:
    """Makes the runner of a model's forward on a GPU: from graphs if the backend has plans for
    them.

    Args:
        cuda_graphs: as configured, "auto" or "off".
        plans: the backend of the forward.
        largest: see GraphedRunner.
        num_step_bytes: what the largest step takes.
    """
    if cuda_graphs == "off" or device.type != "cuda" or not isinstance(plans, StaticPlans):
        return EagerRunner
    recorder = CudaGraphRecorder(device)
    room = Room(lambda: num_free_bytes(device), num_step_bytes)
    return lambda forward: GraphedRunner(forward, plans, recorder, largest, room)
