"""Text deltas -> OpenAI's answers: whole bodies, stream chunks, logprobs, usage, server-sent
events.

Owns the shapes alone. A field that a client may rely on is always there (`finish_reason: null` in
middle chunks).
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.protocol import TokenLogprobs
from serve_app.errors import from_info
from serve_app.streaming import TextDelta, TokenText
from serve_app.tokenization import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer share. `created` is in seconds since the epoch."""

    answer_id: str
    model: str
    created: int
    num_prompt_tokens: int
    is_streamed: bool = False
    includes_usage: bool = False


class AnswerShape(Protocol):
    """How one of the two APIs writes an answer."""

    def whole(self, head: AnswerHead, answer: TextDelta) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, head: AnswerHead) -> list[Json]:
        """The chunks that go before any text."""
        ...

    def chunk(self, head: AnswerHead, delta: TextDelta) -> Json:
        """A chunk of a stream."""
        ...

    def usage_chunk(self, head: AnswerHead, usage: Json) -> Json:
        """The chunk that carries the usage, after the last choice ended."""
        ...


def usage_of(head: AnswerHead, delta: TextDelta) -> Json:
    """Tokens read and written so far."""
    return {
        "prompt_tokens": head.num_prompt_tokens,
        "completion_tokens": delta.num_output_tokens,
        "total_tokens": head.num_prompt_tokens + delta.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": delta.num_cached_tokens},
    }


def _finish_of(delta: TextDelta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def _body(kind: str, head: AnswerHead, choices: list[Json]) -> Json:
    return {
        "id": head.answer_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }


def _with_usage(body: Json, head: AnswerHead) -> Json:
    """A chunk other than the usage chunk says so, where a usage chunk will follow."""
    return body | {"usage": None} if head.includes_usage else body


def _with_sampled(logprobs: TokenLogprobs) -> tuple[tuple[int, float], ...]:
    sampled = (logprobs.token_id, logprobs.logprob)
    is_missing = logprobs.token_id not in dict(logprobs.top)
    return (*logprobs.top, sampled) if logprobs.top and is_missing else logprobs.top


class CompletionShape:
    """/v1/completions.

    Args:
        tokenizer: names the tokens.
        has_logprobs: whether the client asked for them.
    """

    def __init__(self, tokenizer: Tokenizer, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def whole(self, head: AnswerHead, answer: TextDelta) -> Json:
        """See AnswerShape."""
        return _body("text_completion", head, [self._choice(answer)]) | {
            "usage": usage_of(head, answer)
        }

    def opening(self, head: AnswerHead) -> list[Json]:
        """See AnswerShape."""
        return []

    def chunk(self, head: AnswerHead, delta: TextDelta) -> Json:
        """See AnswerShape."""
        return _with_usage(_body("text_completion", head, [self._choice(delta)]), head)

    def usage_chunk(self, head: AnswerHead, usage: Json) -> Json:
        """See AnswerShape."""
        return _body("text_completion", head, []) | {"usage": usage}

    def _choice(self, delta: TextDelta) -> Json:
        return {
            "index": 0,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens) if self._has_logprobs else None,
            "finish_reason": _finish_of(delta),
        }

    def _logprobs(self, tokens: Iterable[TokenText]) -> Json:
        rows = list(tokens)
        name = self._tokenizer.token_name
        return {
            "tokens": [name(row.logprobs.token_id) for row in rows],
            "token_logprobs": [_finite(row.logprobs.logprob) for row in rows],
            "top_logprobs": [
                # The sampled token is always among them, as with OpenAI.
                {
                    name(token_id): _finite(logprob)
                    for token_id, logprob in _with_sampled(row.logprobs)
                }
                for row in rows
            ],
            "text_offset": [row.offset for row in rows],
        }


class ChatShape:
    """/v1/chat/completions.

    Args:
        tokenizer: names the tokens.
        has_logprobs: whether the client asked for them.
    """

    def __init__(self, tokenizer: Tokenizer, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def whole(self, head: AnswerHead, answer: TextDelta) -> Json:
        """See AnswerShape."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message} | self._end(answer)
        return _body("chat.completion", head, [choice]) | {"usage": usage_of(head, answer)}

    def opening(self, head: AnswerHead) -> list[Json]:
        """See AnswerShape."""
        return [self._chunk(head, {"role": "assistant", "content": ""}, TextDelta())]

    def chunk(self, head: AnswerHead, delta: TextDelta) -> Json:
        """See AnswerShape."""
        return self._chunk(head, {"content": delta.text} if delta.text else {}, delta)

    def usage_chunk(self, head: AnswerHead, usage: Json) -> Json:
        """See AnswerShape."""
        return _body("chat.completion.chunk", head, []) | {"usage": usage}

    def _chunk(self, head: AnswerHead, content: Json, delta: TextDelta) -> Json:
        choice = {"index": 0, "delta": content} | self._end(delta)
        return _with_usage(_body("chat.completion.chunk", head, [choice]), head)

    def _end(self, delta: TextDelta) -> Json:
        rows = [self._row(token) for token in delta.tokens] if self._has_logprobs else None
        # An opening chunk has no tokens, so it has no logprobs either.
        return {"logprobs": {"content": rows} if rows else None, "finish_reason": _finish_of(delta)}

    def _row(self, token: TokenText) -> Json:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top]
        return self._entry(token.logprobs.token_id, token.logprobs.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _event(data: Json) -> bytes:
    return (
        b"data: "
        + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        + b"\n\n"
    )


async def events(
    shape: AnswerShape, head: AnswerHead, deltas: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[bytes, None]:
    """An answer as server-sent events: `data:` lines alone, ended by `data: [DONE]`.

    An answer that fails ends with one `data: {"error": …}` event instead, and claims no
    finish_reason. Closing this generator closes `deltas`.
    """
    try:
        for chunk in shape.opening(head):
            yield _event(chunk)
        async for delta in deltas:
            if delta.error is not None:
                yield _event(from_info(delta.error).body())
                return
            yield _event(shape.chunk(head, delta))
            if delta.finish_reason is not None and head.includes_usage:
                yield _event(shape.usage_chunk(head, usage_of(head, delta)))
        yield b"data: [DONE]\n\n"
    finally:
        await deltas.aclose()
