"""Choices -> OpenAI's answers: whole bodies, stream chunks, logprobs, usage, server-sent events.

Owns the shapes alone. A field that a client may rely on is always there (`finish_reason: null` in
middle chunks). `answer_models` says the same as a schema; tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from deployments.protocol import TokenLogprobs
from serve_app.choices import Answer, ChoiceDelta, Usage
from serve_app.errors import from_info
from serve_app.streaming import TextDelta, TokenText
from serve_app.tokenization import Tokenizer
from serve_app.tool_calls import ToolCall

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer share. `created` is in seconds since the epoch."""

    answer_id: str
    model: str
    created: int
    is_streamed: bool = False
    includes_usage: bool = False
    includes_usage_so_far: bool = False


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named in logprobs.

    Args:
        tokenizer: of the model.
        skips_special: whether special tokens show no text, and so have no bytes.
    """

    tokenizer: Tokenizer
    skips_special: bool = True

    def name(self, token_id: int) -> str:
        """See Tokenizer.token_name."""
        return self.tokenizer.token_name(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """What the token adds to the text."""
        return list(self.tokenizer.token_bytes(token_id, self.skips_special))


class AnswerShape(Protocol):
    """How one of the two APIs writes an answer."""

    def whole(self, head: AnswerHead, choices: Sequence[TextDelta], usage: Usage) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, head: AnswerHead, index: int) -> list[Json]:
        """The chunks that go before any text of a choice."""
        ...

    def chunk(self, head: AnswerHead, choice: ChoiceDelta) -> Json:
        """A chunk of a stream."""
        ...

    def usage_chunk(self, head: AnswerHead, usage: Usage) -> Json:
        """The chunk that carries the usage, after the last choice ended."""
        ...


def usage_json(usage: Usage) -> Json:
    """Usage in OpenAI's words."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


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


def _with_usage_so_far(body: Json, head: AnswerHead, answer: Answer) -> Json:
    # Not counted up unless it is asked for: that would be a tenth of an event's cost.
    return body | {"usage": usage_json(answer.usage)} if head.includes_usage_so_far else body


def _with_sampled(logprobs: TokenLogprobs) -> tuple[tuple[int, float], ...]:
    sampled = (logprobs.token_id, logprobs.logprob)
    is_missing = logprobs.token_id not in dict(logprobs.top)
    return (*logprobs.top, sampled) if logprobs.top and is_missing else logprobs.top


class CompletionShape:
    """/v1/completions.

    Args:
        names: names the tokens; None if the client asked for no logprobs.
    """

    def __init__(self, names: TokenNames | None) -> None:
        self._names = names

    def whole(self, head: AnswerHead, choices: Sequence[TextDelta], usage: Usage) -> Json:
        """See AnswerShape."""
        rows = [self._choice(index, delta) for index, delta in enumerate(choices)]
        return _body("text_completion", head, rows) | {"usage": usage_json(usage)}

    def opening(self, head: AnswerHead, index: int) -> list[Json]:
        """See AnswerShape."""
        return []

    def chunk(self, head: AnswerHead, choice: ChoiceDelta) -> Json:
        """See AnswerShape."""
        row = self._choice(choice.index, choice.delta)
        return _with_usage(_body("text_completion", head, [row]), head)

    def usage_chunk(self, head: AnswerHead, usage: Usage) -> Json:
        """See AnswerShape."""
        return _body("text_completion", head, []) | {"usage": usage_json(usage)}

    def _choice(self, index: int, delta: TextDelta) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(self._names, delta.tokens) if self._names else None,
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
        }

    @staticmethod
    def _logprobs(names: TokenNames, tokens: Sequence[TokenText]) -> Json:
        def top_of(logprobs: TokenLogprobs) -> Json:
            top: Json = {}
            # The sampled token is always among them, as with OpenAI.
            for token_id, logprob in _with_sampled(logprobs):
                # Two tokens may have one name ("A" and the byte 0x41): the likelier keeps it.
                top.setdefault(names.name(token_id), _finite(logprob))
            return top

        rows = [token.logprobs for token in tokens]
        return {
            "tokens": [names.name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(row.logprob) if row else None for row in rows],
            "top_logprobs": [top_of(row) if row else None for row in rows],
            "text_offset": [token.offset for token in tokens],
        }


class ChatShape:
    """/v1/chat/completions.

    Args:
        names: names the tokens; None if the client asked for no logprobs.
    """

    def __init__(self, names: TokenNames | None) -> None:
        self._names = names

    def whole(self, head: AnswerHead, choices: Sequence[TextDelta], usage: Usage) -> Json:
        """See AnswerShape."""
        rows = [
            {"index": index, "message": self._message(answer)} | self._end(answer)
            for index, answer in enumerate(choices)
        ]
        return _body("chat.completion", head, rows) | {"usage": usage_json(usage)}

    def opening(self, head: AnswerHead, index: int) -> list[Json]:
        """See AnswerShape."""
        opening = ChoiceDelta(index, TextDelta())
        return [self._chunk(head, {"role": "assistant", "content": ""}, opening)]

    def chunk(self, head: AnswerHead, choice: ChoiceDelta) -> Json:
        """See AnswerShape."""
        delta = choice.delta
        content: Json = {"content": delta.text} if delta.text else {}
        if delta.tool_calls:
            calls = [{"index": call.index} | _call_json(call) for call in delta.tool_calls]
            content["tool_calls"] = calls
        return self._chunk(head, content, choice)

    def usage_chunk(self, head: AnswerHead, usage: Usage) -> Json:
        """See AnswerShape."""
        return _body("chat.completion.chunk", head, []) | {"usage": usage_json(usage)}

    def _message(self, answer: TextDelta) -> Json:
        text = None if answer.tool_calls and not answer.text else answer.text
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if answer.tool_calls:
            message["tool_calls"] = [_call_json(call) for call in answer.tool_calls]
        return message

    def _chunk(self, head: AnswerHead, content: Json, choice: ChoiceDelta) -> Json:
        row = {"index": choice.index, "delta": content} | self._end(choice.delta)
        return _with_usage(_body("chat.completion.chunk", head, [row]), head)

    def _end(self, delta: TextDelta) -> Json:
        names = self._names
        rows = [_chat_row(names, token) for token in delta.tokens] if names else None
        # An opening chunk has no tokens, so it has no logprobs either.
        return {
            "logprobs": {"content": rows} if rows else None,
            "finish_reason": _chat_finish_of(delta),
        }


def _call_json(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _chat_finish_of(delta: TextDelta) -> str | None:
    if delta.finish_reason is None:
        return None
    is_cut = delta.finish_reason.value == "length"
    return "tool_calls" if delta.has_called_tools and not is_cut else delta.finish_reason.value


def _chat_row(names: TokenNames, token: TokenText) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": names.name(token_id),
            "logprob": _finite(logprob),
            "bytes": names.bytes_of(token_id),
        }

    logprobs = token.logprobs or TokenLogprobs(token.token_id, -math.inf)
    top = [entry(token_id, logprob) for token_id, logprob in logprobs.top]
    return entry(token.token_id, logprobs.logprob) | {"top_logprobs": top}


def _event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def events(
    shape: AnswerShape, head: AnswerHead, first: ChoiceDelta, answer: Answer
) -> AsyncGenerator[bytes, None]:
    """An answer as server-sent events: `data:` lines alone, ended by `data: [DONE]`.

    `first` was read from `answer` already. An answer that fails ends with one `data: {"error": …}`
    event instead, and claims no finish_reason. Closing this generator closes `answer`.
    """
    opened: set[int] = set()
    choice: ChoiceDelta | None = first
    try:
        while choice is not None:
            if choice.delta.error is not None:
                yield _event(from_info(choice.delta.error).body())
                return
            if choice.index not in opened:
                opened.add(choice.index)
                for chunk in shape.opening(head, choice.index):
                    yield _event(_with_usage_so_far(chunk, head, answer))
            yield _event(_with_usage_so_far(shape.chunk(head, choice), head, answer))
            choice = await anext(answer, None)
        if head.includes_usage:
            yield _event(shape.usage_chunk(head, answer.usage))
        yield b"data: [DONE]\n\n"
    finally:
        await answer.aclose()
