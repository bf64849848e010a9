"""Reads one streamed answer of an OpenAI-compatible server: when did how many tokens arrive?

    bytes ─► SseLines ─► payloads ─► AnswerReader ─► StreamedAnswer (one time a token)

Knows server-sent events and OpenAI's chunks of completions and chats. Does not know HTTP, clocks
(the caller tells when bytes came) or what the times mean (`measures` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

DONE = b"[DONE]"
MAX_DETAIL_CHARS = 200
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


class AnswerFault(Exception):
    """An answer that is none. `kind` is what errors are counted by, the same for all answers with
    the same fault; the message tells this one.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail[:MAX_DETAIL_CHARS])
        self.kind = kind


ERROR_EVENT = "error event"
BROKEN_STREAM = "broken stream"
NOT_OPENAI = "not OpenAI's shape"


class TokenCount(Enum):
    """How the tokens of an answer's events were counted, best first."""

    USAGE = "usage"
    """Each event told the number of tokens up to it (`continuous_usage_stats`)."""
    LOGPROBS = "logprobs"
    """Each event had one logprob a token."""
    CONFIRMED_EVENTS = "confirmed_events"
    """The whole answer's usage has as many tokens as there were events."""
    SCALED_EVENTS = "scaled_events"
    """Only the whole answer's usage is known: its tokens are spread evenly over the events."""
    EVENTS = "events"
    """Nothing is known: one event is taken for one token."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A whole answer.

    Args:
        token_times_s: of each output token, ascending, by the caller's clock. Tokens that came in
            one event have the same.
        counted_by: how they were counted.
        num_prompt_tokens: as the server counted them; None if it does not say.
        num_cached_tokens: of them, those from its prefix cache; 0 if it does not say.
    """

    token_times_s: Sequence[float]
    counted_by: TokenCount
    num_prompt_tokens: int | None
    num_cached_tokens: int


class SseLines:
    """Bytes as they come to the payloads of whole server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The payloads that became complete with this."""
        whole = self._rest + data
        if b"\r" in whole:
            whole = whole.replace(b"\r\n", b"\n")
        *events, self._rest = whole.split(b"\n\n")
        payloads = [_payload_of(event) for event in events]
        return [payload for payload in payloads if payload]


def _payload_of(event: bytes) -> bytes:
    # Nearly all events are one line; comments (": ping") and names of events have no payload.
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Event:
    """What one event with a choice says of tokens."""

    time_s: float
    has_text: bool
    num_tokens_so_far: int | None
    num_logprobs: int | None


class AnswerReader:
    """One answer from its payloads."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._usage: dict[str, Any] | None = None
        self._has_ended = False

    def push(self, payload: bytes, now_s: float) -> None:
        """Take a payload that arrived at `now_s`.

        Raises:
            AnswerFault: it tells an error, or is not of OpenAI's shape.
        """
        if payload == DONE:
            self._has_ended = True
            return
        chunk = _parse(payload)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = chunk["choices"]
        if choices:
            self._take(_choice_of(choices), usage, now_s)

    def finish(self) -> StreamedAnswer:
        """The answer, once the server has sent all of it.

        Raises:
            AnswerFault: its end is missing, or it has no token.
        """
        if not self._has_ended:
            raise AnswerFault(
                BROKEN_STREAM, f"the stream ended after {len(self._events)} events without its end"
            )
        counts, counted_by = _count_tokens(self._events, _int_of(self._usage, "completion_tokens"))
        times_s = [
            event.time_s
            for event, num_tokens in zip(self._events, counts, strict=True)
            for _ in range(num_tokens)
        ]
        if not times_s:
            raise AnswerFault(NOT_OPENAI, "the answer has no token")
        details = (self._usage or {}).get("prompt_tokens_details")
        return StreamedAnswer(
            times_s,
            counted_by,
            _int_of(self._usage, "prompt_tokens"),
            _int_of(details, "cached_tokens") or 0,
        )

    def _take(self, choice: dict[str, Any], usage: object, now_s: float) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            has_text = any(delta.get(name) for name in _TEXT_FIELDS)
        elif isinstance(choice.get("text"), str):
            has_text = bool(choice["text"])
        else:
            raise AnswerFault(NOT_OPENAI, "a streamed choice has neither text nor delta")
        num_so_far = _int_of(usage, "completion_tokens")
        num_logprobs = _num_logprobs(choice.get("logprobs"))
        self._events.append(_Event(now_s, has_text, num_so_far, num_logprobs))
        # Some servers end without [DONE]; all of them say why an answer ended.
        self._has_ended = self._has_ended or choice.get("finish_reason") is not None


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise AnswerFault(NOT_OPENAI, f"an event is no JSON: {payload[:80]!r}") from error
    if isinstance(chunk, dict) and chunk.get("error"):
        raise AnswerFault(ERROR_EVENT, error_message(chunk))
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
        raise AnswerFault(NOT_OPENAI, f"an event has no choices: {payload[:80]!r}")
    return chunk


def error_message(body: dict[str, Any]) -> str:
    """The message in an error body, of OpenAI's shape or of FastAPI's or none."""
    error = body.get("error") or body.get("detail") or body.get("message") or body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _choice_of(choices: list[Any]) -> dict[str, Any]:
    if not isinstance(choices[0], dict):
        raise AnswerFault(NOT_OPENAI, "a choice is no object")
    return choices[0]


def _int_of(fields: object, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) else None


def _num_logprobs(logprobs: object) -> int | None:
    if not isinstance(logprobs, dict):
        return None
    # A chat has a list of entries, a completion parallel lists.
    entries = logprobs.get("content") or logprobs.get("tokens")
    return len(entries) if isinstance(entries, list) else None


def _count_tokens(events: list[_Event], num_in_all: int | None) -> tuple[list[int], TokenCount]:
    """How many tokens each event carried."""
    totals = [event.num_tokens_so_far for event in events]
    if num_in_all and all(total is not None for total in totals):
        known = [total or 0 for total in totals]
        # The last usage may come after the last choice, with tokens that show no text.
        known[-1] = num_in_all
        steps = zip([0, *known], known, strict=False)
        return [max(0, now - before) for before, now in steps], TokenCount.USAGE
    counts = [event.num_logprobs for event in events if event.has_text]
    if counts and all(count is not None for count in counts):
        return [event.num_logprobs or 0 for event in events], TokenCount.LOGPROBS
    ones = [int(event.has_text) for event in events]
    if not num_in_all or not any(ones):
        return ones, TokenCount.EVENTS
    if num_in_all == sum(ones):
        return ones, TokenCount.CONFIRMED_EVENTS
    return _spread(ones, num_in_all), TokenCount.SCALED_EVENTS


def _spread(ones: list[int], num_tokens: int) -> list[int]:
    # The first event has at least one: it is the first token that was seen.
    num_events, num_seen, counts = sum(ones), 0, []
    for one in ones:
        before = -(-num_seen * num_tokens // num_events)
        num_seen += one
        counts.append(-(-num_seen * num_tokens // num_events) - before)
    return counts
