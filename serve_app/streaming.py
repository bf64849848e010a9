"""From the token stream of a request to its text: detokenizing, stop strings, one end.

Owns what the text of an answer is; streamed and whole answers both read it from here, so they
cannot differ. Does not know HTTP or OpenAI's shapes (`answers` does), nor the other choices of the
same answer (`choices` does).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    TokenChunk,
    TokenLogprobs,
)
from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.stops import StopMatcher
from serve_app.tool_calls import ToolCall, ToolCallParser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token and where its text begins: `offset` characters into the text of its choice.

    `logprobs` is None for the first token of an echoed prompt, which nothing precedes.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What was added to an answer. The last one has a finish_reason or an error; never both, never
    neither.
    """

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    """Of the tokens behind the text, if logprobs were asked for."""
    num_output_tokens: int = 0
    """So far, with those that show no text."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls that became complete."""
    has_called_tools: bool = False
    """Whether the model chose to call a tool so far."""

    @property
    def is_last(self) -> bool:
        """Whether the answer ends here."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompt as the beginning of an answer's text.

    Args:
        text: of the prompt.
        token_ids: of the prompt.
        offsets: where the text of each token begins; empty if no logprobs were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    def tokens(self, logprobs: Sequence[TokenLogprobs | None]) -> tuple[TokenText, ...]:
        """The prompt's tokens with their logprobs.

        Raises:
            ValueError: the engine sent more or fewer logprobs than the prompt has tokens.
        """
        rows = zip(self.token_ids, self.offsets, logprobs, strict=True)
        return tuple(TokenText(*row) for row in rows)


@dataclass(frozen=True, slots=True)
class TextRules:
    """What makes the text of an answer, beside its tokens.

    Args:
        stops: strings that end the text.
        includes_stop: whether the one that ended it is part of the text.
        stop_texts: stop strings that are tokens of their own, by token id; the engine stops there.
        min_tokens: so many tokens are out before a stop string is looked for.
        echo: the prompt, if the answer repeats it.
        is_prompt_alone: the answer is the echo, and what the engine adds to it is left out.
    """

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    stop_texts: Mapping[int, str] = field(default_factory=dict)
    min_tokens: int = 0
    echo: PromptEcho | None = None
    is_prompt_alone: bool = False


class TextStream:
    """The answer to one request as text deltas.

    Tokens are taken one by one however many arrive together, so that the text, the token count and
    the place where a stop string ends it do not depend on how they were batched on the way.

    Args:
        tokens: the request's token stream; closed at the end, at an error and when the reader
            leaves, which aborts the request.
        detokenizer: primed with the prompt.
        rules: what else makes the text.
    """

    def __init__(
        self,
        tokens: AsyncGenerator[TokenChunk, None],
        detokenizer: IncrementalDetokenizer,
        rules: TextRules | None = None,
    ) -> None:
        self._rules = rules or TextRules()
        self._source = tokens
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(self._rules.stops, self._rules.includes_stop)
        self._echo = self._rules.echo
        self._pending: list[TokenText] = []
        self._num_chars = len(self._echo.text) if self._echo else 0
        self._num_tokens = 0
        self._num_cached = 0
        self._last_token_id: int | None = None

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """All deltas, the last one with the end. Iterate once, and close it if you leave early."""
        try:
            async for chunk in self._source:
                delta = self._read(chunk)
                if delta.text or delta.is_last:
                    yield delta
                if delta.is_last:
                    return
            yield self._fail(ErrorInfo(ErrorKind.ENGINE, "the engine's answer broke off"))
        except Exception:
            # The edge of the process: whatever the backend raises must reach the client as an
            # error, not as silence.
            logger.exception("a token stream failed")
            yield self._fail(
                ErrorInfo(ErrorKind.ENGINE, "the engine failed while it served this request")
            )
        finally:
            await self._source.aclose()

    def _read(self, chunk: TokenChunk) -> TextDelta:
        self._num_cached = max(self._num_cached, chunk.num_cached_tokens)
        echoed = self._read_echo(chunk)
        if self._rules.is_prompt_alone and chunk.token_ids:
            return self._delta(echoed, FinishReason.LENGTH)
        text = echoed + "".join(self._push(chunk, index) for index in range(len(chunk.token_ids)))
        if self._matcher.has_matched:
            return self._delta(text, FinishReason.STOP)
        match chunk.finish_reason:
            case None:
                return self._delta(text, None)
            case FinishReason.STOP | FinishReason.LENGTH:
                return self._finish(text, chunk)
            case _:
                return self._fail(
                    chunk.error or ErrorInfo(ErrorKind.UNAVAILABLE, "the request was aborted")
                )

    def _read_echo(self, chunk: TokenChunk) -> str:
        # With the first chunk and not before: a request that is refused has no text.
        if self._echo is None or chunk.error is not None:
            return ""
        echo, self._echo = self._echo, None
        if echo.offsets:
            self._pending.extend(echo.tokens(chunk.prompt_logprobs or ()))
        return echo.text

    def _push(self, chunk: TokenChunk, index: int) -> str:
        if self._matcher.has_matched:
            return ""
        token_id = self._last_token_id = chunk.token_ids[index]
        if chunk.logprobs is not None:
            self._pending.append(TokenText(token_id, self._num_chars, chunk.logprobs[index]))
        self._num_tokens += 1
        ends_it = chunk.finish_reason is FinishReason.STOP and index == len(chunk.token_ids) - 1
        # The token that ends a text is none of it, special or not.
        text = self._detokenizer.push([] if ends_it else [token_id])
        self._num_chars += len(text)
        return text if self._num_tokens <= self._rules.min_tokens else self._matcher.push(text)

    def _finish(self, text: str, chunk: TokenChunk) -> TextDelta:
        text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        if self._matcher.has_matched:
            return self._delta(text, FinishReason.STOP)
        if chunk.finish_reason is FinishReason.STOP and self._rules.includes_stop:
            text += self._ending_text(chunk)
        return self._delta(text, chunk.finish_reason)

    def _ending_text(self, chunk: TokenChunk) -> str:
        ending = self._last_token_id if chunk.stop_token_id is None else chunk.stop_token_id
        return "" if ending is None else self._rules.stop_texts.get(ending, "")

    def _delta(self, text: str, reason: FinishReason | None) -> TextDelta:
        # Tokens whose text is held back travel with the text, once it comes.
        tokens: tuple[TokenText, ...] = ()
        if text or reason is not None:
            tokens, self._pending = tuple(self._pending), []
        return TextDelta(text, tokens, self._num_tokens, self._num_cached, reason)

    def _fail(self, error: ErrorInfo) -> TextDelta:
        return TextDelta("", (), self._num_tokens, self._num_cached, None, error)


async def with_tool_calls(
    deltas: AsyncGenerator[TextDelta, None], parser: ToolCallParser
) -> AsyncGenerator[TextDelta, None]:
    """An answer whose tool calls are told apart from its text; closes `deltas`.

    Tokens whose text is held back by the parser travel with what comes next.
    """
    tokens: tuple[TokenText, ...] = ()
    has_called = False
    try:
        async for delta in deltas:
            parsed = [parser.push(delta.text)]
            if delta.finish_reason is not None:
                parsed.append(parser.flush())
            text = "".join(part.text for part in parsed)
            calls = tuple(call for part in parsed for call in part.calls)
            tokens += delta.tokens
            has_called = has_called or (bool(calls) and not parser.is_forced)
            if text or calls or delta.is_last:
                yield replace(
                    delta, text=text, tokens=tokens, tool_calls=calls, has_called_tools=has_called
                )
                tokens = ()
    finally:
        await deltas.aclose()
