"""All choices of one HTTP request as one answer: interleaved, counted, ended together.

Owns what the choices share: the order in which their deltas leave, the usage, the client's
deadline, and their one end. Does not know text or OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.protocol import ErrorInfo, ErrorKind
from serve_app.errors import in_client_words
from serve_app.streaming import TextDelta


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What was added to the choice of this index."""

    index: int
    delta: TextDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by all choices; a prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Answer:
    """The choices of one HTTP request as they come. Read it to its end or close it.

    An error of one choice is the last delta and ends all of them.

    Args:
        choices: their deltas, in order of their index: prompt * n + i.
        prompt_lengths: in tokens, one a prompt.
        deadline: in the event loop's time; None: as long as it takes.
        client_names: what the client calls the fields of a GenerateRequest, where it differs.
        on_end: called once, when all choices have ended.
    """

    def __init__(
        self,
        choices: Sequence[AsyncGenerator[TextDelta, None]],
        prompt_lengths: Sequence[int],
        deadline: float | None = None,
        client_names: Mapping[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_choices = len(choices)
        self._num_prompt_tokens = sum(prompt_lengths)
        self._num_choices_each = len(choices) // len(prompt_lengths)
        self._choices = choices
        self._client_names = client_names or {}
        self._on_end = on_end
        self._last = [TextDelta()] * len(choices)
        deltas = _alone(choices[0]) if len(choices) == 1 else _interleaved(choices)
        self._deltas = deltas if deadline is None else _until(deadline, deltas)
        self._is_closed = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> ChoiceDelta:
        """The next delta of any choice."""
        choice = await anext(self._deltas)
        if choice.delta.error is not None:
            error = in_client_words(choice.delta.error, self._client_names)
            return ChoiceDelta(choice.index, replace(choice.delta, error=error))
        self._last[choice.index] = choice.delta
        return choice

    @property
    def usage(self) -> Usage:
        """What was read and written so far."""
        cached = [delta.num_cached_tokens for delta in self._last]
        each = self._num_choices_each
        # The choices of a prompt find one another's blocks; what was cached before any of them is
        # what the least lucky one found.
        by_prompt = [min(cached[i : i + each]) for i in range(0, len(cached), each)]
        num_output_tokens = sum(delta.num_output_tokens for delta in self._last)
        return Usage(self._num_prompt_tokens, num_output_tokens, sum(by_prompt))

    async def aclose(self) -> None:
        """End all choices, which aborts those that still run. Every answer comes here, once:
        finished, failed, timed out or abandoned.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._deltas.aclose()
        finally:
            try:
                for choice in self._choices:
                    await choice.aclose()
            finally:
                self._on_end()


async def _alone(choice: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[ChoiceDelta, None]:
    async for delta in choice:
        yield ChoiceDelta(0, delta)


async def _interleaved(
    choices: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[ChoiceDelta, None]:
    """Each delta as it comes. Of each choice one delta at most is waited for, so a slow reader
    slows down the sources, not this process' memory.
    """
    waiting = {asyncio.ensure_future(anext(choice)): i for i, choice in enumerate(choices)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                delta = task.result()
                yield ChoiceDelta(index, delta)
                if delta.error is not None:
                    return
                if delta.is_last:
                    await choices[index].aclose()
                else:
                    waiting[asyncio.ensure_future(anext(choices[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


async def _until(
    deadline: float, deltas: AsyncGenerator[ChoiceDelta, None]
) -> AsyncGenerator[ChoiceDelta, None]:
    """The deltas that come before `deadline`, then an error."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            yield await asyncio.wait_for(anext(deltas), deadline - loop.time())
    except StopAsyncIteration:
        return
    except asyncio.TimeoutError:
        message = "timeout: the answer was not complete in time; allow more or ask for less"
        yield ChoiceDelta(0, TextDelta(error=ErrorInfo(ErrorKind.TIMEOUT, message, "timeout")))
    finally:
        await deltas.aclose()


async def collect(answer: Answer) -> list[TextDelta]:
    """Each choice as one delta, in order; only the error matters of an answer that failed."""
    parts: list[list[TextDelta]] = [[] for _ in range(answer.num_choices)]
    async for choice in answer:
        if choice.delta.error is not None:
            return [choice.delta]
        parts[choice.index].append(choice.delta)
    return [_joined(deltas) for deltas in parts]


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    last = deltas[-1]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        num_output_tokens=last.num_output_tokens,
        num_cached_tokens=last.num_cached_tokens,
        finish_reason=last.finish_reason,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        has_called_tools=last.has_called_tools,
    )
