"""How requests were batched before chunked prefill: three schedulers to compare ours with, in
reports and tests. Never in the service.

    static         one batch at a time: it takes its requests, and nobody joins until all have
                   finished (FasterTransformer)
    orca           iteration by iteration: whole prompts join the decodes' steps (Yu et al., Orca,
                   OSDI'22); KV memory is reserved for the longest possible answer
    prefill-first  iteration by iteration: while a prompt fits it runs, and all decodes wait
                   (vLLM before chunked prefill; Kwon et al., SOSP'23)

All take requests first come, first served, and find no prefixes. They are the service's scheduler
with another way to fill a step, so that all else stays the same: the engine, blocks, preemption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from deployments.config import SchedulerConfig
from deployments.engine.clock import Clock
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits, RequestOutput, SchedulerOutput
from deployments.engine.request import Request
from deployments.engine.scheduler import Scheduler
from deployments.engine.step_budget import StepBudget
from deployments.engine.step_plan import StepPlan
from deployments.engine.waiting_queue import WaitingQueue
from deployments.protocol import FinishReason, GenerateRequest
from loadtest.sim_replica import SimScheduler


class JointScheduler(Scheduler):
    """The service's scheduler, open to who books its decodes together; see SimScheduler."""

    @property
    def running(self) -> Sequence[Request]:
        """See SimScheduler."""
        return self._running

    def finish_whole(self, request: Request) -> RequestOutput:
        """See SimScheduler."""
        return self._finish(request, FinishReason.LENGTH)


class _PlanBeside(StepPlan):
    """The chunks of a step whose decodes are booked elsewhere."""

    def __init__(self, budget: int, num_decodes: int) -> None:
        super().__init__(budget - num_decodes)
        self._num_decodes = num_decodes

    @property
    def num_decodes(self) -> int:
        """See StepPlan."""
        return self._num_decodes


class ChunkedPrefill(JointScheduler):
    """The service's own scheduler, whose decodes can be booked together."""

    def may_start_anybody(self) -> bool:
        """See SimScheduler."""
        head = self._waiting.find_head(self._clock.now()) if self._waiting else None
        if head is None:
            return False
        is_full = len(self._running) >= self._config.max_num_seqs
        return not is_full or head.priority < self._running[-1].priority

    def schedule_beside(
        self, num_decodes: int, take_blocks: Callable[[], None]
    ) -> SchedulerOutput | None:
        """See SimScheduler."""
        now = self._clock.now()
        head = self._waiting.find_head(now) if self._waiting else None
        budget = self._budget.next_step(len(self._running))
        if budget < num_decodes or (head and head.priority < self._running[-1].priority):
            return None
        take_blocks()
        step = _PlanBeside(budget, num_decodes)
        self._schedule_chunks(step, now)
        return step.seal()


class FirstCome(JointScheduler, ABC):
    """What the old ways share: a queue in order of arrival, prompts that run whole, admission by
    memory. Each of them fills a step its own way.

    Args:
        config: of it max_num_seqs, max_num_waiting and the token budget count.
        limits: what the loaded model can hold.
        kv: block tables over a pool of `limits.num_blocks` blocks.
        budget: unused: their steps are as large as their prompts.
        clock: where time comes from.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: ModelLimits,
        kv: KVCacheManager,
        budget: StepBudget,
        clock: Clock,
    ) -> None:
        super().__init__(config, limits, kv, budget, clock)
        self._waiting = WaitingQueue(timeout_s=0.0)  # all are overdue at once: the oldest goes
        self._largest_step = config.max_num_seqs * limits.max_model_len

    @abstractmethod
    def _fill(self, step: StepPlan, now: float) -> None:
        """Put into a step what this policy runs next."""

    @abstractmethod
    def _num_reserved_tokens(self, request: Request) -> int:
        """Tokens whose memory a running request keeps from others."""

    def add(self, incoming: GenerateRequest, seed: int) -> None:
        """See StepScheduler; nobody is more urgent than others."""
        super().add(replace(incoming, priority=0), seed)

    def find_hold_until_s(self) -> float | None:
        """Never: what waits may start."""
        return None

    def may_start_anybody(self) -> bool:
        """See SimScheduler."""
        return self.num_waiting > 0 and len(self._running) < self._config.max_num_seqs

    def schedule_beside(
        self, num_decodes: int, take_blocks: Callable[[], None]
    ) -> SchedulerOutput | None:
        """Never: a step with prompts is made row by row."""
        return None

    def schedule(self) -> SchedulerOutput:
        """See StepScheduler."""
        step = StepPlan(self._largest_step)
        self._fill(step, self._clock.now())
        return step.seal()

    def _admit_prompts(self, step: StepPlan, now: float, max_num_tokens: int) -> int:
        """Start waiting requests, prompts whole, until one does not fit; the first may be larger
        than `max_num_tokens`. Returns their tokens.
        """
        num_tokens = 0
        while (head := self._waiting.find_head(now)) is not None and self._fits(head):
            if num_tokens and num_tokens + head.num_tokens > max_num_tokens:
                break
            num_tokens += head.num_tokens
            self._waiting.remove(head)
            self._admit(head, [], now)
            table = self._kv.block_table(head)
            step.add_chunk(head, head.num_uncomputed_tokens, table, is_forced=False)
        return num_tokens

    def _fits(self, request: Request) -> bool:
        if len(self._running) >= self._config.max_num_seqs:
            return False
        reserved = sum(map(self._num_reserved_blocks, self._running))
        return reserved + self._num_reserved_blocks(request) <= self._kv.num_usable_blocks

    def _num_reserved_blocks(self, request: Request) -> int:
        return self._kv.num_blocks_for(self._num_reserved_tokens(request))


class StaticBatching(FirstCome):
    """One batch at a time, to its end."""

    def _fill(self, step: StepPlan, now: float) -> None:
        if self._running:
            self._schedule_decodes(step, now)
        else:
            self._admit_prompts(step, now, self._largest_step)

    def may_start_anybody(self) -> bool:
        """See SimScheduler."""
        return False  # asked only while a batch runs

    def _num_reserved_tokens(self, request: Request) -> int:
        return request.max_num_tokens


class OrcaLike(FirstCome):
    """Whole prompts in the steps of running decodes."""

    def _fill(self, step: StepPlan, now: float) -> None:
        self._schedule_decodes(step, now)
        self._admit_prompts(step, now, self._largest_step)

    def _num_reserved_tokens(self, request: Request) -> int:
        return self._limits.max_num_tokens


class PrefillFirst(FirstCome):
    """Prompts alone while any fits, up to `max_num_batched_tokens` a step; decodes when none
    does.
    """

    def _fill(self, step: StepPlan, now: float) -> None:
        if self._admit_prompts(step, now, self._config.token_budget) == 0:
            self._schedule_decodes(step, now)

    def _num_reserved_tokens(self, request: Request) -> int:
        return request.num_tokens


SchedulerFactory = Callable[
    [SchedulerConfig, ModelLimits, KVCacheManager, StepBudget, Clock], SimScheduler
]

POLICIES: dict[str, SchedulerFactory] = {
    "chunked": ChunkedPrefill,
    "static": StaticBatching,
    "orca": OrcaLike,
    "prefill-first": PrefillFirst,
}
