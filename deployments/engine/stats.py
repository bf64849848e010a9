"""What the engine says about itself: one record a step, and counters over its life. Measures, never
decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.engine.outputs import ChunkReason, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One row of a step: which tokens of which request, and why it was there."""

    request_id: str
    start: int
    num_tokens: int
    reason: ChunkReason
    is_forced: bool


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what it held and how long its parts took, in seconds."""

    index: int
    started_s: float
    schedule_s: float
    execute_s: float
    update_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int
    chunks: tuple[ChunkRecord, ...]


def chunk_records(output: SchedulerOutput) -> tuple[ChunkRecord, ...]:
    """The rows of a step as records."""
    return tuple(
        ChunkRecord(
            row.request.request_id,
            row.num_computed_tokens,
            row.num_scheduled_tokens,
            row.reason,
            row.is_forced,
        )
        for row in output.scheduled
    )


class StepLog:
    """The last steps, and counters that outlive them.

    Args:
        num_kept: how many steps are kept.
    """

    def __init__(self, num_kept: int) -> None:
        self._steps: deque[StepStats] = deque(maxlen=num_kept)
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_preemptions = 0
        self.num_forced_chunks = 0
        self.num_cached_tokens = 0
        self.num_out_of_memory = 0
        """Steps that did not fit the device's memory and were made smaller."""
        self.num_finished: Counter[str] = Counter()

    @property
    def steps(self) -> Iterable[StepStats]:
        """The kept steps, oldest first."""
        return tuple(self._steps)

    def add(self, step: StepStats) -> None:
        """Keep a step and count what it held."""
        self._steps.append(step)
        self.num_steps += 1
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_tokens
        self.num_preemptions += step.num_preempted
        self.num_forced_chunks += sum(chunk.is_forced for chunk in step.chunks)
