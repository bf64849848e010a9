"""One request inside the engine: the only mutable record of the core.

Owns a request's tokens, its progress, its status and the moments that matter. Does not know blocks
or steps.

    token_ids   [p p p p p p p p|o o o]
                 ^ computed ^           num_computed_tokens: in the KV cache
                              ^ rest ^  num_uncomputed_tokens: what a step may catch up with
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from deployments.protocol import (
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    RequestTimings,
    SamplingParams,
    TokenLogprobs,
)


class RequestStatus(Enum):
    """Where a request stands. PREEMPTED waits again, having lost its blocks but not its output."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_LEGAL_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


_FINISHED = RequestStatus.FINISHED  # looking up an enum's member takes longer than comparing it


class IllegalTransition(RuntimeError):
    """A fault of the scheduler: a request was moved to a status it cannot have from where it
    was."""


@dataclass(eq=False, slots=True)
class Request:
    """A request's whole state. Identity is the object; two requests are never equal."""

    request_id: str
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    """Of the sampler; fixed at arrival so that a recomputed token is the same token."""
    max_num_tokens: int
    """Prompt and output together may reach this; the next token would exceed a limit."""
    arrival_s: float
    arrival_index: int
    """Breaks every tie, so that an order is total and the same in each run."""
    priority: int = 0
    chunk_size: int | None = None
    cache_salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    num_reused_tokens: int = 0
    """Tokens found in the prefix cache when it last left the queue."""
    num_preemptions: int = 0
    num_passes: int = 0
    """How many later requests were admitted past this one while it did not fit."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks of `token_ids`, as far as they were needed."""
    ready_since_s: float = 0.0
    """Since when its next chunk could have run: arrival, preemption, or the end of the step that
    ran the last one."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Of the prompt's tokens so far, if it asked; the first has none. A preemption keeps them."""
    grammar_state: object | None = None
    """Where the sampler stands in its grammar: opaque here, and gone when the request is."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_gap_s: float | None = None
    """Between its last two tokens."""
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None

    @classmethod
    def arrive(
        cls, incoming: GenerateRequest, *, now: float, index: int, seed: int, max_num_tokens: int
    ) -> Request:
        """The record of a request that was just accepted; `seed` is used if it brought none of its
        own."""
        params = incoming.sampling_params
        num_prompt_tokens = len(incoming.prompt_token_ids)
        return cls(
            request_id=incoming.request_id,
            token_ids=list(incoming.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling_params=params,
            seed=seed if params.seed is None else params.seed,
            max_num_tokens=min(max_num_tokens, num_prompt_tokens + params.max_tokens),
            arrival_s=now,
            arrival_index=index,
            priority=incoming.priority,
            chunk_size=incoming.chunk_size,
            cache_salt=incoming.cache_salt,
            ready_since_s=now,
            prompt_logprobs=[] if params.num_prompt_logprobs is None else [None],
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far; a preemption does not change them."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are not in the KV cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Prompt tokens whose log-probabilities it asked for and lacks."""
        if self.sampling_params.num_prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - len(self.prompt_logprobs)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks are of use to it: tokens found there have no logits."""
        return self.num_missing_prompt_logprobs == 0

    @property
    def is_decode(self) -> bool:
        """Whether all it lacks is the token it sampled last."""
        return self.num_computed_tokens == len(self.token_ids) - 1 >= self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is _FINISHED

    @property
    def urgency_key(self) -> tuple[int, int]:
        """Sorts most urgent first: by class, then by arrival."""
        return (self.priority, self.arrival_index)

    def transition(self, status: RequestStatus, now: float) -> None:
        """Move to another status and stamp the moment.

        Raises:
            IllegalTransition: this status cannot follow the present one.
        """
        if status not in _LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self.request_id}: {self.status.value} -> {status.value}")
        self.status = status
        if status is RequestStatus.RUNNING:
            self.num_passes = 0
            if self.first_scheduled_s is None:
                self.first_scheduled_s = now
        elif status is RequestStatus.PREEMPTED:
            self.num_preemptions += 1
            self.num_computed_tokens = 0
            # As old as it is: who had begun is served before those who have not.
            self.ready_since_s = self.arrival_s
        elif status is RequestStatus.FINISHED:
            self.finished_s = now

    def finish(self, reason: FinishReason, now: float, error: ErrorInfo | None = None) -> None:
        """End it, once.

        Raises:
            IllegalTransition: it had ended already.
        """
        self.transition(RequestStatus.FINISHED, now)
        self.finish_reason = reason
        self.error = error

    def take_token(
        self, token_id: int, now: float, eos_token_ids: Container[int]
    ) -> FinishReason | None:
        """Take the token that a step sampled for it, and tell why that ends it; None if it goes
        on."""
        self.token_ids.append(token_id)
        if self.last_token_s is None:
            self.first_token_s = now
        else:
            self.token_gap_s = now - self.last_token_s
        self.last_token_s = now
        may_stop = token_id in eos_token_ids or token_id in self.sampling_params.stop_token_ids
        if may_stop and self._stops_at(token_id, eos_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def _stops_at(self, last: int, eos_token_ids: Container[int]) -> bool:
        params = self.sampling_params
        if params.grammar is not None and last in eos_token_ids:
            return True  # the sampler allows it only where the grammar ends
        if self.num_output_tokens <= params.min_tokens:
            return False
        is_end = last in eos_token_ids and not params.ignore_eos
        return is_end or last in params.stop_token_ids

    @property
    def stop_token_id(self) -> int | None:
        """The one of its stop_token_ids that ended it, if one did."""
        is_stopped = self.finish_reason is FinishReason.STOP
        last = self.token_ids[-1]
        return last if is_stopped and last in self.sampling_params.stop_token_ids else None

    def timings(self) -> RequestTimings:
        """Durations since arrival; call once it has finished."""
        end = self.arrival_s if self.finished_s is None else self.finished_s
        scheduled = end if self.first_scheduled_s is None else self.first_scheduled_s
        return RequestTimings(
            queued_s=scheduled - self.arrival_s,
            first_token_s=None
            if self.first_token_s is None
            else self.first_token_s - self.arrival_s,
            total_s=end - self.arrival_s,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
        )
