"""What crosses processes between an ingress and an engine replica: plain frozen records, stdlib
only.

Owns the records and their own validity. Does not know HTTP, tokenizers, tensors or the scheduler.
Errors travel as data (`ErrorInfo` in the last `TokenChunk`), never as exceptions: an exception that
crosses a process boundary changes its type on the way, a record does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for per token (OpenAI's bound for chat)."""


class FinishReason(str, Enum):
    """Why a request ended. The first two are OpenAI's words; the others never reach a client as
    success.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorKind(str, Enum):
    """Whose fault an error is, which decides its HTTP status at the ingress."""

    INVALID = "invalid"
    """The request can never be served as it is; the client must change it."""
    CONTEXT_LENGTH = "context_length"
    """The prompt is longer than the model's context or than the whole KV pool."""
    OVERLOADED = "overloaded"
    """The service is full now; the same request may succeed later."""
    UNAVAILABLE = "unavailable"
    """The replica is gone or draining; another may serve the same request."""
    ENGINE = "engine"
    """The engine failed while it held the request."""
    TIMEOUT = "timeout"
    """The client's own deadline passed before the answer was complete."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data: whose fault, what to change, and which field of the request it concerns."""

    kind: ErrorKind
    message: str
    param: str | None = None


class RequestRefused(ValueError):
    """A request that cannot be accepted; `info` says why and what to change."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info

    @classmethod
    def invalid(cls, param: str, message: str) -> RequestRefused:
        """The client's fault, in one field."""
        return cls(ErrorInfo(ErrorKind.INVALID, message, param))


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise RequestRefused.invalid(param, f"{param} {message}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must look like. `text` is the JSON of a schema, a regular expression, or the
    JSON of a list of choices; empty for any JSON object.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice"]
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Order of application: logit_bias, penalties, min_tokens mask, grammar mask, temperature, top_k,
    top_p, min_p.
    `temperature` 0 is greedy. `top_k` 0 is off. `seed` None lets the engine draw one.

    Raises:
        RequestRefused: a field is outside its range; the message names the field and the range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    """None: no logprobs; 0: of the sampled token alone; n: of the n likeliest as well."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None
    """As `num_logprobs`, for the tokens of the prompt."""
    grammar: Grammar | None = None
    """None: any text."""

    def __post_init__(self) -> None:
        def in_range(param: str, low: float, high: float) -> None:
            value = getattr(self, param)
            if not (_is_number(value) and low <= value <= high):
                message = f"{param} must be a number between {low:g} and {high:g}, got {value!r}"
                raise RequestRefused.invalid(param, message)

        _require(
            _is_integer(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            "must be at least 1",
        )
        _require(
            _is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens!r}",
        )
        in_range("temperature", 0.0, 2.0)
        in_range("top_p", 0.0, 1.0)
        _require(self.top_p > 0.0, "top_p", "must be greater than 0; use temperature 0 for greedy")
        _require(
            _is_integer(self.top_k) and self.top_k >= 0,
            "top_k",
            "must be 0 (off) or a positive number of tokens",
        )
        in_range("min_p", 0.0, 1.0)
        in_range("repetition_penalty", 0.01, 100.0)
        in_range("presence_penalty", -2.0, 2.0)
        in_range("frequency_penalty", -2.0, 2.0)
        for token_id, bias in self.logit_bias:
            is_id = _is_integer(token_id) and token_id >= 0
            _require(is_id, "logit_bias", f"has {token_id!r} for a token id")
            _require(
                _is_number(bias) and -100.0 <= bias <= 100.0,
                "logit_bias",
                f"values must be between -100 and 100, got {bias!r}",
            )
        for param, count in (
            ("logprobs", self.num_logprobs),
            ("prompt_logprobs", self.num_prompt_logprobs),
        ):
            _require(
                count is None or 0 <= count <= MAX_LOGPROBS,
                param,
                f"must be between 0 and {MAX_LOGPROBS}, got {count}",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that no random number is needed."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue, in token ids.

    `priority` 0 is most urgent. `chunk_size` caps this request's chunks below the engine's own
    setting. `arrival_time` is wall-clock seconds since the epoch (clocks of two processes share no
    other zero). Requests with different `cache_salt` never share KV blocks. `block_hashes` name the
    prompt's full blocks, first to last, for whoever chooses a replica: a hint, nothing is reused
    because of it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    chunk_size: int | None = None
    arrival_time: float = 0.0
    cache_salt: str = ""
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sampled token under the model's own distribution (before any
    sampling field).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, likeliest first."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Durations of one request in seconds, measured by the engine's clock from its arrival
    there, and how much it took.

    `queued_s` ends at its first step, or with the request if it never ran.
    """

    queued_s: float
    first_token_s: float | None
    total_s: float
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """The metrics page of one replica (Prometheus text, version 0.0.4), and which one it is."""

    deployment: str
    replica: str
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Everything that became ready for one request since its reader last looked; the last one has a
    finish_reason.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token, the first None; with the first chunk that has tokens."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request, if one of stop_token_ids did (the end-of-sequence token
    leaves None).
    """
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None
    error: ErrorInfo | None = None
    num_preceding: int = 0
    """Output tokens of the request in chunks and runs before this one: where it belongs."""
    replica: str = ""
    """Which one serves the request; in its first chunk, where a relay may be opened."""


class TokenRun(NamedTuple):
    """Tokens of one request in an item of a relay; a NamedTuple, since one is pickled per token.

    `key` is that of the request's Seat; `num_preceding` as in TokenChunk.
    """

    key: int
    num_preceding: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class Seat(NamedTuple):
    """Where tokens of a request may travel instead of on its own stream: on the relay of this
    reader, under a key that the reader gives out once.
    """

    reader: str
    key: int


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Asks one replica for the stream that its requests of one reader share."""

    reader: str
    replica: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What an ingress must know of the model a pool serves; sent by the replica, so both always
    agree.

    `tokenizer_files` are the files of the tokenizer by name, so that an ingress needs no access to
    the model's source.
    """

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of one replica at one moment; counters grow from the start of the replica."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_forced_chunks: int
    num_finished: dict[str, int]
