"""What the engine says about itself: one record a step, counters over its life, and whom it tells.
Measures, never decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from deployments.engine.outputs import ChunkReason, ScheduledRequest, SchedulerOutput
from deployments.engine.request import Request
from deployments.protocol import FinishReason, RequestTimings

_WITHOUT_TOKEN = (FinishReason.ABORT, FinishReason.ERROR)
_DECODE = ChunkReason.DECODE
_ADMITTED = ChunkReason.ADMITTED


class ChunkRecord(NamedTuple):
    """One row of a step: which tokens of which request, and why it was there."""

    request_id: str
    start: int
    num_tokens: int
    reason: ChunkReason
    is_forced: bool


@dataclass(frozen=True, slots=True)
class DecodeRecords:
    """The decodes of a step, in its order: lists, for most rows of most steps are decodes."""

    request_ids: list[str]
    starts: list[int]
    """Tokens each had computed before."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the KV cache that they read, their own included."""
        return sum(self.starts) + len(self.starts)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step meant to its requests, summed up: the tokens it sampled, how long they were
    waited for, in seconds, and what those who began found in the prefix cache.
    """

    num_sampled: int
    first_token_s: tuple[float, ...]
    """Since arrival, of each request that got its first token."""
    gaps_s: Mapping[float, int]
    """Since a request's token before -> how many waited so long. One entry mostly: all who were in
    the step before waited equally long.
    """
    num_prompt_tokens: int
    """Of the requests whose first chunk was in it."""
    num_cached_tokens: int
    """Of those prompts, found in the prefix cache."""


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
    tokens: StepTokens
    decodes: DecodeRecords
    prefills: tuple[ChunkRecord, ...]

    @property
    def chunks(self) -> tuple[ChunkRecord, ...]:
        """All rows: decodes first, then prefill chunks."""
        decodes = zip(self.decodes.request_ids, self.decodes.starts, strict=True)
        rows = (ChunkRecord(name, start, 1, _DECODE, False) for name, start in decodes)
        return (*rows, *self.prefills)


class EngineObserver(Protocol):
    """Is told what happens in an engine, on the engine's thread: it must be quick and never raise.

    The default of each method is to ignore what it is told.
    """

    def on_step(self, step: StepStats) -> None:
        """A step has run."""

    def on_failed_step(self) -> None:
        """A step has raised; what it held has ended."""

    def on_end(self, reason: FinishReason, timings: RequestTimings) -> None:
        """A request has ended; called once for each that was accepted."""


def decode_records(output: SchedulerOutput) -> DecodeRecords:
    """The decodes of a step as records."""
    rows = output.scheduled[: output.num_decode_tokens]
    return DecodeRecords(
        [row.request.request_id for row in rows], [row.num_computed_tokens for row in rows]
    )


def chunk_records(rows: Iterable[ScheduledRequest]) -> tuple[ChunkRecord, ...]:
    """Rows of a step as records."""
    return tuple(
        ChunkRecord(
            row.request.request_id,
            row.num_computed_tokens,
            row.num_scheduled_tokens,
            row.reason,
            row.is_forced,
        )
        for row in rows
    )


def step_tokens(output: SchedulerOutput) -> StepTokens:
    """Sum up a step. Call once it is booked, before anything else happens to its requests."""
    chunks = output.scheduled[output.num_decode_tokens :]
    sampled = [row.request for row in output.scheduled if row.samples_token]
    if any([request.finish_reason is not None for request in sampled]):
        sampled = [request for request in sampled if request.finish_reason not in _WITHOUT_TOKEN]
    gaps_s = _count([request.token_gap_s for request in sampled])
    begun = [row.request for row in chunks if row.reason is _ADMITTED]
    return StepTokens(
        num_sampled=len(sampled),
        first_token_s=_first_token_s(sampled) if gaps_s.pop(None, 0) else (),
        gaps_s={gap_s: count for gap_s, count in gaps_s.items() if gap_s is not None},
        num_prompt_tokens=sum([request.num_prompt_tokens for request in begun]),
        num_cached_tokens=sum([request.num_cached_tokens for request in begun]),
    )


def _count(gaps_s: list[float | None]) -> dict[float | None, int]:
    # Mostly all are alike, and counting one value is faster than counting each.
    if gaps_s and gaps_s.count(gaps_s[0]) == len(gaps_s):
        return {gaps_s[0]: len(gaps_s)}
    return Counter(gaps_s)


def _first_token_s(sampled: Iterable[Request]) -> tuple[float, ...]:
    return tuple(
        request.last_token_s - request.arrival_s
        for request in sampled
        if request.token_gap_s is None and request.last_token_s is not None
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

    @property
    def last(self) -> StepStats:
        """The latest one.

        Raises:
            IndexError: none has run.
        """
        return self._steps[-1]

    def add(self, step: StepStats) -> None:
        """Keep a step and count what it held."""
        self._steps.append(step)
        self.num_steps += 1
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_decode_tokens += step.num_decode_tokens
        self.num_preemptions += step.num_preempted
        self.num_forced_chunks += sum([chunk.is_forced for chunk in step.prefills])
