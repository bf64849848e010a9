"""Decides what each step computes, and what its result means to each request.

There is no prefill phase and no decode phase (vLLM V1): a request has `num_computed_tokens`, and
each step lets it catch up with `num_tokens`. The order within a step is stall-free (Agrawal et al.,
Sarathi-Serve, OSDI'24):

  0. A waiting head of a more urgent class than the least urgent running request preempts if it
     does not fit.
  1. Decodes, most urgent first, one token each. Where no block is free the least urgent running
     request is preempted: it loses its blocks and is recomputed later. Most urgent first, so that
     a victim is never one already in the step.
  2. Prefill chunks: running prefills and waiting requests, merged by the queue's order, as far as
     the budget goes. Nobody is admitted in a step that had to preempt for a block: the victim
     would see others move into its place.

Does not know tensors, threads, sockets or where time comes from.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import merge
from itertools import takewhile
from operator import attrgetter

from deployments.config import SchedulerConfig
from deployments.engine.admission_check import check_request
from deployments.engine.block_pool import IntegrityError
from deployments.engine.chunk_plan import next_chunk_size
from deployments.engine.clock import Clock
from deployments.engine.integrity import SchedulerStuck, check_blocks, check_requests
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits, ModelOutput, RequestOutput, SchedulerOutput
from deployments.engine.request import Request, RequestStatus
from deployments.engine.step_budget import StepBudget
from deployments.engine.step_plan import StepPlan
from deployments.engine.waiting_queue import QueuedRequest, WaitingQueue, order_key
from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    RequestRefused,
    TokenLogprobs,
)

_RUNNING = RequestStatus.RUNNING  # looking up an enum's member takes longer than comparing it
_urgency = attrgetter("urgency_key")


class Scheduler:
    """The requests of one replica, waiting and running.

    Args:
        config: the scheduler's own section.
        limits: what the loaded model can hold.
        kv: block tables over a pool of `limits.num_blocks` blocks.
        budget: how many tokens each step may hold.
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
        self._budget = budget
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(config.batch_timeout_s)
        self._running: list[Request] = []  # most urgent first
        self._num_arrivals = 0

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
        """Whether anything is waiting or running."""
        return bool(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that have not finished, in order of arrival."""
        return list(self._requests)

    def add(self, incoming: GenerateRequest, seed: int) -> None:
        """Queue a request; `seed` is its sampler's if it brought none.

        Raises:
            RequestRefused: it can never be served as it is, its id is in use, or the queue is full.
        """
        check_request(incoming, self._limits)
        if incoming.request_id in self._requests:
            raise RequestRefused.invalid(
                "request_id", f"request id {incoming.request_id} is in use"
            )
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
        self._kv.hash_prompt(request)
        self._requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands and free its blocks; None if there is no such request
        (any more).
        """
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def fail(self, request_id: str, error: ErrorInfo) -> RequestOutput | None:
        """End a request with an error; None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ERROR, error)

    def find_hold_until_s(self) -> float | None:
        """Until when an idle engine should wait for more prompt tokens; None: start now.

        Only with `min_batch_tokens` set, only while nothing runs, and never beyond the batch
        timeout.
        """
        if self._running:
            return None
        return self._waiting.find_hold_until_s(self._clock.now(), self._config.min_batch_tokens)

    # --- a step -----------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Fill a step. Every row's blocks are there; nothing is published until
        `update_from_output`.

        Raises:
            SchedulerStuck: requests are there, but the step would be empty.
        """
        now = self._clock.now()
        step = StepPlan(self._budget.next_step(len(self._running)))
        self._preempt_for_urgent_head(step, now)
        self._schedule_decodes(step, now)
        self._schedule_chunks(step, now)
        output = step.seal()
        if not output.scheduled and self.has_requests:
            raise SchedulerStuck(
                f"{self.num_waiting} waiting, {self.num_running} running, nothing to schedule"
            )
        return output

    def update_from_output(self, step: SchedulerOutput, result: ModelOutput) -> list[RequestOutput]:
        """Book what a step computed and publish the blocks it filled.

        Returns one output for each request that got a token or ended. A request that ended while
        the step ran (an abort) gets nothing more.
        """
        now, kv, limits = self._clock.now(), self._kv, self._limits
        is_sound = result.is_sound(step)
        outputs: list[RequestOutput] = []
        for row in step.scheduled:
            request, num_computed, num_scheduled, _, samples_token, _, _ = row
            if request.is_finished:
                continue
            request.num_computed_tokens = num_computed + num_scheduled
            request.ready_since_s = now
            if not is_sound and result.has_failed(row):
                outputs.append(self._fail_row(request, result))
                continue
            if result.prompt_logprobs:
                request.prompt_logprobs += result.prompt_logprobs.get(request.request_id, ())
            if num_scheduled > 1 or request.num_computed_tokens % limits.block_size == 0:
                kv.publish(request, num_computed)
            if samples_token:
                token_id = result.token_ids[request.request_id]
                logprobs = result.logprobs.get(request.request_id) if result.logprobs else None
                reason = request.take_token(token_id, now, limits.eos_token_ids)
                output = (
                    RequestOutput.of_token(request, token_id, logprobs)
                    if reason is None
                    else self._finish(request, reason, token_id=token_id, logprobs=logprobs)
                )
                if request.prompt_logprobs and request.num_output_tokens == 1:
                    output = output._replace(prompt_logprobs=request.prompt_logprobs)
                outputs.append(output)
        return outputs

    def fail_step(self, step: SchedulerOutput, error: ErrorInfo) -> list[RequestOutput]:
        """End every request of a step that raised; nothing it may have written is published."""
        outputs = (self.fail(row.request.request_id, error) for row in step.scheduled)
        return [output for output in outputs if output is not None]

    # --- 0: an urgent head ------------------------------------------------------------------------

    def _preempt_for_urgent_head(self, step: StepPlan, now: float) -> None:
        head = self._waiting.find_head(now) if self._running and self._waiting else None
        if head is None or self._running[-1].priority <= head.priority:
            return
        hits = self._kv.find_cached_prefix(head)
        num_short = self._kv.num_blocks_short(head, hits)
        num_slots_short = len(self._running) + 1 - self._config.max_num_seqs
        if num_short <= 0 and num_slots_short <= 0:
            return
        less_urgent = (other for other in reversed(self._running) if other.priority > head.priority)
        victims = self._kv.find_victims(less_urgent, num_short, set(hits))
        if victims is None:
            return
        for victim in victims or self._running[-1:]:
            self._preempt(victim, step, now)
        # At once, or the decodes of this very step would take the blocks that were freed for it.
        self._admit(head, hits, now)
        self._waiting.remove(head)

    # --- 1: decodes -------------------------------------------------------------------------------

    def _schedule_decodes(self, step: StepPlan, now: float) -> None:
        kv = self._kv
        # Request.is_decode spelled out: in this loop a property costs as much as all the rest.
        decodes = [
            request
            for request in self._running
            if request.num_computed_tokens
            == len(request.token_ids) - 1
            >= request.num_prompt_tokens
        ][: step.num_tokens_left]
        for request in kv.find_blockless(decodes):
            # Not so if it was preempted for one before it.
            if request.status is _RUNNING and self._free_a_block_for(request, step, now):
                kv.append_block(request)
        if step.has_preempted:
            decodes = [request for request in decodes if request.status is _RUNNING]
        step.add_decodes(decodes, kv.block_tables)

    def _free_a_block_for(self, request: Request, step: StepPlan, now: float) -> bool:
        """Preempt from the least urgent on until a block is free; false if that came to the request
        itself.
        """
        while self._kv.num_free_blocks == 0:
            victim = self._running[-1]
            self._preempt(victim, step, now)
            step.close_to_newcomers()
            if victim is request:
                return False
        return True

    # --- 2: prefill chunks ------------------------------------------------------------------------

    def _schedule_chunks(self, step: StepPlan, now: float) -> None:
        if not self._waiting and step.num_decodes == len(self._running):
            return
        admitted: list[Request] = []
        passed: list[Request] = []
        # Ends the queue's side early: of ten thousand waiting, no more are looked at than may
        # start.
        queue = self._waiting.in_order(now) if step.is_open_to_newcomers else ()
        waiting = takewhile(lambda _: self._may_admit_past(passed), queue)
        for entry in merge(self._running_prefills(step, now), waiting, key=lambda entry: entry.key):
            if step.num_tokens_left == 0:
                break
            request = entry.request
            if request.status is not _RUNNING:
                if step.was_preempted(request) or not self._may_admit_past(passed):
                    continue
                if not self._try_admit(request, now):
                    passed.append(request)
                    continue
                admitted.append(request)
                for overtaken in passed:
                    overtaken.num_passes += 1
            num_tokens = min(self._next_chunk_size(request), step.num_tokens_left)
            step.add_chunk(request, num_tokens, self._kv.block_table(request), entry.is_forced)
        for request in admitted:
            self._waiting.remove(request)

    def _running_prefills(self, step: StepPlan, now: float) -> list[QueuedRequest]:
        if step.num_decodes == len(self._running):
            return []
        after_s = self._config.batch_timeout_s
        entries = [
            QueuedRequest(request, order_key(request, request.num_uncomputed_tokens, now, after_s))
            for request in self._running
            if not request.is_decode
        ]
        return sorted(entries, key=lambda entry: entry.key)

    def _may_admit_past(self, passed: list[Request]) -> bool:
        """Whether a free slot is there and nobody who did not fit has been overtaken too often."""
        limit = self._config.max_num_passes
        if len(self._running) >= self._config.max_num_seqs or len(passed) > limit:
            return False
        return all(request.num_passes < limit for request in passed)

    def _try_admit(self, request: Request, now: float) -> bool:
        hits = self._kv.find_cached_prefix(request)
        if self._kv.num_blocks_short(request, hits) > 0:
            return False
        self._admit(request, hits, now)
        return True

    def _next_chunk_size(self, request: Request) -> int:
        largest = self._config.chunk_size
        if request.chunk_size is not None:
            largest = min(largest, request.chunk_size)
        return next_chunk_size(
            request.num_uncomputed_tokens,
            largest,
            self._config.overlap_ratio,
            is_first=request.num_computed_tokens == 0,
        )

    # --- changes of status ------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        num_cached = len(self._kv.find_cached_prefix(request)) * self._limits.block_size
        self._waiting.add(request, request.num_tokens - num_cached)

    def _admit(self, request: Request, hits: list[int], now: float) -> None:
        """Give a waiting request its blocks and let it run; the caller takes it from the queue."""
        self._kv.admit(request, hits)
        request.num_reused_tokens = request.num_computed_tokens
        if request.first_scheduled_s is None:
            request.num_cached_tokens = request.num_computed_tokens
        request.transition(_RUNNING, now)
        insort(self._running, request, key=_urgency)

    def _preempt(self, request: Request, step: StepPlan, now: float) -> None:
        self._leave_running(request)
        request.transition(RequestStatus.PREEMPTED, now)
        step.note_preempted(request)
        self._enqueue(request)

    def _leave_running(self, request: Request) -> None:
        self._kv.free(request)
        del self._running[bisect_left(self._running, request.urgency_key, key=_urgency)]

    def _fail_row(self, request: Request, result: ModelOutput) -> RequestOutput:
        # Whatever spoiled its row may stand in any of its blocks: nobody may find them.
        self._kv.unpublish(request)
        message = result.errors.get(request.request_id, "the model returned no token")
        return self._finish(request, FinishReason.ERROR, ErrorInfo(ErrorKind.ENGINE, message))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: ErrorInfo | None = None,
        *,
        token_id: int | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> RequestOutput:
        """The one exit: give back all that it holds and tell its reader why it ended."""
        if request.status is _RUNNING:
            self._leave_running(request)
        else:
            self._waiting.remove(request)
        request.finish(reason, self._clock.now(), error)
        del self._requests[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            token_id=token_id,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=reason,
            stop_token_id=request.stop_token_id,
            timings=request.timings(),
            error=error,
        )

    def check_integrity(self) -> None:
        """Compare all records with each other; for tests and for an idle engine.

        Raises:
            IntegrityError: they contradict each other, or blocks are held while nothing runs.
        """
        check_blocks(self._kv, self._running)
        check_requests(self._requests.values(), self._running, self._waiting)
        if len(self._running) > self._config.max_num_seqs:
            raise IntegrityError("too many requests are running")
