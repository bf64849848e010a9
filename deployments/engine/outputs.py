"""The frozen records at the two seams of a step: scheduler -> executor -> scheduler -> readers.

The records made once a request and step are named tuples: a frozen dataclass takes three times as
long to make, and they were most of what a running request cost the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from deployments.engine.request import Request
from deployments.protocol import ErrorInfo, FinishReason, RequestTimings, TokenLogprobs


class ChunkReason(str, Enum):
    """Why a row is in a step; the step log shows it for each."""

    DECODE = "decode"
    ADMITTED = "admitted"
    """First chunk of a request that left the queue."""
    RESUMED = "resumed"
    """First chunk after a preemption."""
    CONTINUED = "continued"
    """A later chunk of a running prefill."""


_DECODE = ChunkReason.DECODE  # looking up an enum's member costs as much as making a row


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute `num_scheduled_tokens` tokens from
    `num_computed_tokens` on.

    `block_table` is a live view, valid until the step is updated: block `i` holds tokens
    [i * block_size, (i + 1) * block_size).
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_table: Sequence[int]
    samples_token: bool
    """Whether this share ends at the last known token, so that the next one is sampled from it."""
    reason: ChunkReason
    is_forced: bool
    """Whether it had been ready for longer than the batch timeout and so went ahead of shorter
    ones."""

    @classmethod
    def decode(cls, request: Request, block_table: Sequence[int]) -> ScheduledRequest:
        """The row of a request that computes the token it sampled last.

        Not by the constructor, which takes twice as long: most rows are made here.
        """
        num_computed = request.num_computed_tokens
        return tuple.__new__(cls, (request, num_computed, 1, block_table, True, _DECODE, False))


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes: decodes first, then prefill chunks."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    num_prefill_tokens: int
    num_decode_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step; at most its budget."""
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def num_sampling(self) -> int:
        """Rows that sample a token: every decode, and each chunk that ends its prompt."""
        chunks = self.scheduled[self.num_decode_tokens :]
        return self.num_decode_tokens + sum([row.samples_token for row in chunks])


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What an executor made of a step, by request id.

    Each that sampled is in `token_ids` or in `errors` (its row was unusable; the other rows are
    sound). `prompt_logprobs` holds what this step adds to them, also for chunks that do not sample.
    """

    token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    def is_sound(self, step: SchedulerOutput) -> bool:
        """Whether no row of this step has failed."""
        return not self.errors and len(self.token_ids) == step.num_sampling

    def has_failed(self, row: ScheduledRequest) -> bool:
        """Whether nothing that a row computed may be used."""
        request_id = row.request.request_id
        return request_id in self.errors or (row.samples_token and request_id not in self.token_ids)


class RequestOutput(NamedTuple):
    """What a step (or an abort, or a refusal) means to one request's reader."""

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    timings: RequestTimings | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token of a request that asked."""

    @classmethod
    def of_token(
        cls, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> RequestOutput:
        """What a token means to a request that goes on; made as `ScheduledRequest.decode` is."""
        name, num_cached = request.request_id, request.num_cached_tokens
        return tuple.__new__(
            cls, (name, token_id, logprobs, num_cached, None, None, None, None, None)
        )


class OutOfDeviceMemory(RuntimeError):
    """A step did not fit the device's memory. Nothing of it counts; a smaller one may fit."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a loaded model can hold; fixed for the life of an engine.

    `num_blocks` counts the null block, which nobody is given.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]

    @property
    def num_pool_tokens(self) -> int:
        """Tokens the KV pool holds when one request has all of it."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output together of one request, at most."""
        return min(self.max_model_len, self.num_pool_tokens)
