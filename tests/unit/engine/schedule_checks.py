"""The invariants of a step, checked from outside the scheduler: each function knows one kind of
fault.

They recompute everything from the rows and from the requests; of the scheduler's own records they
read the block tables, the order of its queue and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from deployments.config import SchedulerConfig
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import (
    ChunkReason,
    ModelLimits,
    ScheduledRequest,
    SchedulerOutput,
)
from deployments.engine.request import Request, RequestStatus
from deployments.protocol import GenerateRequest


@dataclass(slots=True, eq=False)
class Tracked:
    """One request as the net sees it."""

    incoming: GenerateRequest
    request: Request
    seed: int
    ready_since_s: float
    token_ids: list[int] = field(default_factory=list)
    num_passes: int = 0

    @property
    def is_running(self) -> bool:
        return self.request.status is RequestStatus.RUNNING

    @property
    def urgency(self) -> tuple[int, int]:
        return (self.incoming.priority, self.request.arrival_index)


@dataclass(frozen=True, slots=True)
class Before:
    """What stood when a step was about to be scheduled."""

    now: float
    running: tuple[Tracked, ...]
    decodes: tuple[Tracked, ...]
    waiting: tuple[Tracked, ...]

    @classmethod
    def look(cls, now: float, live: Iterable[Tracked]) -> Before:
        running = tuple(item for item in live if item.is_running)
        decodes = tuple(item for item in running if item.request.is_decode)
        waiting = tuple(item for item in live if not item.is_running)
        return cls(now, running, decodes, waiting)


def is_decode_row(row: ScheduledRequest) -> bool:
    return row.reason is ChunkReason.DECODE


class StepChecks:
    """Checks of one step at a time, for one scheduler."""

    def __init__(self, config: SchedulerConfig, limits: ModelLimits, kv: KVCacheManager) -> None:
        self._config = config
        self._limits = limits
        self._kv = kv

    def check(self, before: Before, step: SchedulerOutput, live: dict[str, Tracked]) -> None:
        """Raises AssertionError where the step breaks an invariant."""
        rows = step.scheduled
        assert rows or not live, "requests are there and nothing is scheduled"
        self._check_totals(step)
        for row in rows:
            self._check_row(row, live[row.request.request_id], before.now)
        self._check_writes(rows, live)
        self._check_victims(before, step)
        scheduled = {row.request for row in rows}
        for item in before.decodes:
            there = item.request in scheduled or item.request in step.preempted
            assert there, f"{item.request.request_id} decodes and is not in the step"
        chunks = [live[row.request.request_id] for row in rows if not is_decode_row(row)]
        for one, other in pairwise(chunks):
            assert not self._goes_before(other, one, before.now), "chunks are out of order"
        self._check_prefills(before, step, chunks)
        self._check_passes(before, step)

    def _check_totals(self, step: SchedulerOutput) -> None:
        rows = step.scheduled
        requests = [row.request for row in rows]
        assert len(set(requests)) == len(requests), "a request is in a step twice"
        assert not set(requests) & set(step.preempted), "both scheduled and preempted"
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        assert num_tokens <= self._config.token_budget, "the budget is exceeded"
        assert num_tokens == step.num_tokens, "the step miscounts its tokens"
        kinds = [is_decode_row(row) for row in rows]
        assert kinds == sorted(kinds, reverse=True), "decodes do not come first"
        assert sum(kinds) == step.num_decode_tokens

    def _check_row(self, row: ScheduledRequest, item: Tracked, now: float) -> None:
        request, size = row.request, row.num_scheduled_tokens
        assert request is item.request and item.is_running
        end = row.num_computed_tokens + size
        assert size >= 1, f"{request.request_id}: an empty share"
        assert row.num_computed_tokens == request.num_computed_tokens
        assert end <= request.num_tokens
        assert row.samples_token == (end == request.num_tokens), "samples at the wrong token"
        num_blocks = -(-request.num_tokens // self._limits.block_size)
        assert len(row.block_table) == num_blocks, "blocks held for no token, or tokens without"
        is_prefill = not is_decode_row(row)
        is_forced = is_prefill and self._is_overdue(item, now)
        assert row.is_forced == is_forced, f"{request.request_id}: forced wrongly"
        if is_prefill:
            largest = min(self._config.chunk_size, request.chunk_size or self._config.chunk_size)
            overlap = min(int(largest * self._config.overlap_ratio), largest - 1)
            assert size + (overlap if row.num_computed_tokens else 0) <= largest, "chunk too large"

    def _check_writes(self, rows: Iterable[ScheduledRequest], live: dict[str, Tracked]) -> None:
        size = self._limits.block_size
        holders: Counter[int] = Counter()
        for item in live.values():
            if item.is_running:
                holders.update(self._kv.block_table(item.request))
        pool = self._kv._pool
        for row in rows:
            end = row.num_computed_tokens + row.num_scheduled_tokens
            for block in row.block_table[row.num_computed_tokens // size : -(-end // size)]:
                assert block != 0, "the null block is written"
                assert holders[block] == 1, f"block {block} is written and shared"
                assert pool._hash_of[block] is None, f"block {block} is written and findable"

    def _check_victims(self, before: Before, step: SchedulerOutput) -> None:
        if not step.preempted:
            return
        kept = [item.urgency for item in before.running if item.is_running]
        for victim in step.preempted:
            assert victim.num_computed_tokens == 0
            key = (victim.priority, victim.arrival_index)
            assert all(other < key for other in kept), "a victim more urgent than one who stays"

    def _check_prefills(self, before: Before, step: SchedulerOutput, chunks: list[Tracked]) -> None:
        scheduled = {row.request for row in step.scheduled}
        has_room = step.num_tokens < self._config.token_budget
        for item in before.running:
            if not item.is_running or item.request in scheduled:
                continue
            assert not has_room, f"{item.request.request_id} runs and gets nothing of what is left"
            for other in chunks:
                is_passed = self._goes_before(item, other, before.now)
                assert not is_passed, f"{item.request.request_id} runs and was passed"

    def _goes_before(self, one: Tracked, other: Tracked, now: float) -> bool:
        """Whether class and age alone put one before another; length may decide where they do
        not.
        """
        keys = []
        for item in (one, other):
            is_overdue = self._is_overdue(item, now)
            age = (0, item.ready_since_s, item.request.arrival_index) if is_overdue else (1,)
            keys.append((item.incoming.priority, *age))
        return keys[0] < keys[1]

    def _is_overdue(self, item: Tracked, now: float) -> bool:
        return now - item.ready_since_s >= self._config.batch_timeout_s

    def _check_passes(self, before: Before, step: SchedulerOutput) -> None:
        admitted = [item for item in before.waiting if item.is_running]
        for item in before.waiting:
            if item.is_running or item.request in step.preempted:
                item.num_passes = 0
            else:
                self._count_passes(item, admitted, before.now)

    def _count_passes(self, item: Tracked, admitted: list[Tracked], now: float) -> None:
        item.num_passes += sum(self._goes_before(item, other, now) for other in admitted)
        assert item.num_passes <= self._config.max_num_passes, (
            f"{item.request.request_id} was passed {item.num_passes} times"
        )
