"""How requests were batched before chunked prefill: three schedulers to compare ours with, in
reports and tests. Never in the service.

    static         one batch at a time: it takes its requests, and nobody joins until all have
                   finished (FasterTransformer)
    orca           iteration by iteration: whole prompts join the decodes' steps (Yu et al., Orca,
                   OSDI'22); KV memory is reserved for the longest possible answer
    prefill-first  iteration by iteration: while a prompt fits it runs, and all decodes wait
                   (vLLM before chunked prefill; Kwon et al., SOSP'23)

All take requests first come, first served, and keep no prefixes. They stand behind the interface
that the engine asks of its scheduler, so that the engine, its blocks and its clock stay the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from deployments.config import SchedulerConfig
from deployments.engine.admission_check import check_request
from deployments.engine.clock import Clock
from deployments.engine.integrity import check_blocks
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits, ModelOutput, RequestOutput, SchedulerOutput
from deployments.engine.request import Request, RequestStatus
from deployments.engine.scheduler import Scheduler
from deployments.engine.step_budget import StepBudget
from deployments.engine.step_plan import StepPlan
from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    RequestRefused,
)
from loadtest.sim_replica import SimScheduler


class FirstCome(ABC):
    """What the old ways share: a queue in order of arrival, admission by memory, the booking of
    results. Each of them fills a step its own way.

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
        self._config = config
        self._limits = limits
        self._kv = kv
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._num_arrivals = 0
        self._largest_step = config.max_num_seqs * limits.max_model_len

    @abstractmethod
    def _fill(self, step: StepPlan) -> None:
        """Put into a step what this policy runs next."""

    @abstractmethod
    def _num_reserved_tokens(self, request: Request) -> int:
        """Tokens whose memory a running request keeps from others."""

    # --- coming and going -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks

    @property
    def has_requests(self) -> bool:
        """See StepScheduler."""
        return bool(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """See StepScheduler."""
        return list(self._requests)

    def add(self, incoming: GenerateRequest, seed: int) -> None:
        """See StepScheduler."""
        check_request(incoming, self._limits)
        if len(self._waiting) >= self._config.max_num_waiting:
            message = f"{len(self._waiting)} requests are waiting already; try again later"
            raise RequestRefused(ErrorInfo(ErrorKind.OVERLOADED, message))
        request = Request.arrive(
            incoming,
            now=self._clock.now(),
            index=self._num_arrivals,
            seed=seed,
            max_num_tokens=self._limits.max_num_tokens,
        )
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """See StepScheduler."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def fail(self, request_id: str, error: ErrorInfo) -> RequestOutput | None:
        """See StepScheduler."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ERROR, error=error)

    def find_hold_until_s(self) -> float | None:
        """Never: what waits may start."""
        return None

    # --- decodes booked together: see SimScheduler ------------------------------------------------

    @property
    def running(self) -> Sequence[Request]:
        """See SimScheduler."""
        return self._running

    def may_start_anybody(self) -> bool:
        """See SimScheduler."""
        return bool(self._waiting) and len(self._running) < self._config.max_num_seqs

    def schedule_beside(
        self, num_decodes: int, take_blocks: Callable[[], None]
    ) -> SchedulerOutput | None:
        """Never: a step with prompts is made row by row."""
        return None

    def finish_whole(self, request: Request) -> RequestOutput:
        """See SimScheduler."""
        return self._finish(request, FinishReason.LENGTH)

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """See StepScheduler."""
        step = StepPlan(self._largest_step)
        self._fill(step)
        return step.seal()

    def update_from_output(self, step: SchedulerOutput, result: ModelOutput) -> list[RequestOutput]:
        """See StepScheduler."""
        outputs = []
        for row in step.scheduled:
            request = row.request
            if request.is_finished:
                continue
            request.num_computed_tokens += row.num_scheduled_tokens
            token_id = result.token_ids[request.request_id]
            reason = request.take_token(token_id, self._clock.now(), self._limits.eos_token_ids)
            outputs.append(
                RequestOutput(request.request_id, token_id)
                if reason is None
                else self._finish(request, reason, token_id)
            )
        return outputs

    def fail_step(self, step: SchedulerOutput, error: ErrorInfo) -> list[RequestOutput]:
        """See StepScheduler."""
        outputs = (self.fail(row.request.request_id, error) for row in step.scheduled)
        return [output for output in outputs if output is not None]

    def check_integrity(self) -> None:
        """See StepScheduler."""
        check_blocks(self._kv, self._running)

    # --- what the policies are made of ------------------------------------------------------------

    def _admit_prompts(self, step: StepPlan, max_num_tokens: int) -> int:
        """Start waiting requests, prompts whole, until one does not fit; the first may be larger
        than `max_num_tokens`. Returns their tokens.
        """
        num_tokens = 0
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting[0]
            if num_tokens and num_tokens + request.num_tokens > max_num_tokens:
                break
            num_tokens += request.num_tokens
            self._waiting.popleft()
            self._kv.admit(request, [])
            request.transition(RequestStatus.RUNNING, self._clock.now())
            self._running.append(request)
            table = self._kv.block_table(request)
            step.add_chunk(request, request.num_uncomputed_tokens, table, is_forced=False)
        return num_tokens

    def _fits(self, request: Request) -> bool:
        if len(self._running) >= self._config.max_num_seqs:
            return False
        reserved = sum(map(self._num_reserved_blocks, self._running))
        return reserved + self._num_reserved_blocks(request) <= self._kv.num_usable_blocks

    def _num_reserved_blocks(self, request: Request) -> int:
        return self._kv.num_blocks_for(self._num_reserved_tokens(request))

    def _add_decodes(self, step: StepPlan, requests: list[Request]) -> None:
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                continue
            if self._kv.needs_block(request):
                if not self._free_a_block_for(request, step):
                    return
                self._kv.append_block(request)
            step.add_decode(request, self._kv.block_table(request))

    def _free_a_block_for(self, request: Request, step: StepPlan) -> bool:
        while self._kv.num_free_blocks == 0:
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, step: StepPlan) -> None:
        self._leave_running(victim)
        victim.transition(RequestStatus.PREEMPTED, self._clock.now())
        step.note_preempted(victim)
        self._waiting.appendleft(victim)

    def _leave_running(self, request: Request) -> None:
        self._kv.free(request)
        self._running.remove(request)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> RequestOutput:
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self._waiting.remove(request)
        request.finish(reason, self._clock.now(), error)
        del self._requests[request.request_id]
        return RequestOutput(
            request.request_id,
            token_id,
            finish_reason=reason,
            timings=request.timings(),
            error=error,
        )


class StaticBatching(FirstCome):
    """One batch at a time, to its end."""

    def _fill(self, step: StepPlan) -> None:
        if self._running:
            self._add_decodes(step, list(self._running))
        else:
            self._admit_prompts(step, self._largest_step)

    def may_start_anybody(self) -> bool:
        """See SimScheduler."""
        return False  # asked only while a batch runs

    def _num_reserved_tokens(self, request: Request) -> int:
        return request.max_num_tokens


class OrcaLike(FirstCome):
    """Whole prompts in the steps of running decodes."""

    def _fill(self, step: StepPlan) -> None:
        self._add_decodes(step, list(self._running))
        self._admit_prompts(step, self._largest_step)

    def _num_reserved_tokens(self, request: Request) -> int:
        return self._limits.max_num_tokens


class PrefillFirst(FirstCome):
    """Prompts alone while any fits, up to `max_num_batched_tokens` a step; decodes when none
    does.
    """

    def _fill(self, step: StepPlan) -> None:
        if self._admit_prompts(step, self._config.token_budget) == 0:
            self._add_decodes(step, list(self._running))

    def _num_reserved_tokens(self, request: Request) -> int:
        return request.num_tokens


class _PlanBeside(StepPlan):
    """The chunks of a step whose decodes are booked elsewhere."""

    def __init__(self, budget: int, num_decodes: int) -> None:
        super().__init__(budget - num_decodes)
        self._num_decodes = num_decodes

    @property
    def num_decodes(self) -> int:
        """See StepPlan."""
        return self._num_decodes


class ChunkedPrefill(Scheduler):
    """The service's own scheduler, whose decodes can be booked together."""

    @property
    def running(self) -> Sequence[Request]:
        """See SimScheduler."""
        return self._running

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

    def finish_whole(self, request: Request) -> RequestOutput:
        """See SimScheduler."""
        return self._finish(request, FinishReason.LENGTH)


SchedulerFactory = Callable[
    [SchedulerConfig, ModelLimits, KVCacheManager, StepBudget, Clock], SimScheduler
]

POLICIES: dict[str, SchedulerFactory] = {
    "chunked": ChunkedPrefill,
    "static": StaticBatching,
    "orca": OrcaLike,
    "prefill-first": PrefillFirst,
}
