"""From the token stream of a request to its text: detokenizing, stop strings, one end.

Owns what the text of an answer is; streamed and whole answers both read it from here, so they
cannot differ. Does not know HTTP or OpenAI's shapes (`answers` does).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    TokenChunk,
    TokenLogprobs,
)
from serve_app.tokenization import IncrementalDetokenizer

logger = logging.getLogger(__name__)


class StopMatcher:
    """Cuts a growing text before the first of several stop strings.

    The result is `text[:min(text.find(stop) for stop in stops)]` of the whole text, however it was
    cut into pieces. Text that could still turn out to begin a stop string is held back, and no more
    than that.

    Args:
        stops: non-empty strings; none of them means that nothing is ever cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.has_matched = False
        """Whether the text has ended; what is pushed later is dropped."""

    def push(self, text: str) -> str:
        """The text that is now certain to precede any stop string."""
        if self.has_matched:
            return ""
        text = self._held + text
        found = self._find_match(text)
        begun = self._find_begun(text)
        if found < len(text) and found <= begun:
            self.has_matched, self._held = True, ""
            return text[:found]
        # A stop string that began before a match may still complete and be the first one, so both
        # are held.
        self._held = text[begun:]
        return text[:begun]

    def flush(self) -> str:
        """The text held back, once nothing will follow; cut if a match was only waiting for an
        earlier one.
        """
        text, self._held = self._held, ""
        found = self._find_match(text)
        self.has_matched = self.has_matched or found < len(text)
        return text[:found]

    def _find_match(self, text: str) -> int:
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(starts, default=len(text))

    def _find_begun(self, text: str) -> int:
        longest = max((_overlap(text, stop) for stop in self._stops), default=0)
        return len(text) - longest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class TokenText:
    """One output token and where its text begins: `offset` characters into the output."""

    logprobs: TokenLogprobs
    offset: int


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

    @property
    def is_last(self) -> bool:
        """Whether the answer ends here."""
        return self.finish_reason is not None or self.error is not None


class TextStream:
    """The answer to one request as text deltas.

    Tokens are taken one by one however many arrive together, so that the text, the token count and
    the place where a stop string ends it do not depend on how they were batched on the way.

    Args:
        tokens: the request's token stream; closed at the end, at an error and when the reader
            leaves, which aborts the request.
        detokenizer: primed with the prompt.
        stops: strings that end the text.
        min_tokens: so many tokens are out before a stop string is looked for.
    """

    def __init__(
        self,
        tokens: AsyncGenerator[TokenChunk, None],
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._source = tokens
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._pending: list[TokenText] = []
        self._num_chars = 0
        self._num_tokens = 0
        self._num_cached = 0

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
        text = "".join(self._push(chunk, index) for index in range(len(chunk.token_ids)))
        if self._matcher.has_matched:
            return self._delta(text, FinishReason.STOP)
        match chunk.finish_reason:
            case None:
                return self._delta(text, None)
            case FinishReason.STOP | FinishReason.LENGTH:
                return self._finish(text, chunk.finish_reason)
            case _:
                return self._fail(
                    chunk.error or ErrorInfo(ErrorKind.UNAVAILABLE, "the request was aborted")
                )

    def _push(self, chunk: TokenChunk, index: int) -> str:
        if self._matcher.has_matched:
            return ""
        if chunk.logprobs is not None:
            self._pending.append(TokenText(chunk.logprobs[index], self._num_chars))
        self._num_tokens += 1
        ends_it = chunk.finish_reason is FinishReason.STOP and index == len(chunk.token_ids) - 1
        # The token that ends a text is none of it, special or not.
        shown = [] if ends_it else chunk.token_ids[index : index + 1]
        text = self._detokenizer.push(shown)
        self._num_chars += len(text)
        return text if self._num_tokens <= self._min_tokens else self._matcher.push(text)

    def _finish(self, text: str, reason: FinishReason) -> TextDelta:
        text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        return self._delta(text, FinishReason.STOP if self._matcher.has_matched else reason)

    def _delta(self, text: str, reason: FinishReason | None) -> TextDelta:
        # Tokens whose text is held back travel with the text, once it comes.
        tokens: tuple[TokenText, ...] = ()
        if text or reason is not None:
            tokens, self._pending = tuple(self._pending), []
        return TextDelta(text, tokens, self._num_tokens, self._num_cached, reason)

    def _fail(self, error: ErrorInfo) -> TextDelta:
        return TextDelta("", (), self._num_tokens, self._num_cached, None, error)


async def collect(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    """The whole answer as one delta; of an answer that fails, the error alone matters."""
    texts: list[str] = []
    tokens: list[TokenText] = []
    last = TextDelta()
    try:
        async for last in deltas:
            texts.append(last.text)
            tokens.extend(last.tokens)
    finally:
        await deltas.aclose()
    return TextDelta(
        "".join(texts),
        tuple(tokens),
        last.num_output_tokens,
        last.num_cached_tokens,
        last.finish_reason,
        last.error,
    )
