"""What waits for the reader of one request: its tokens pile up here until it looks. Belongs to one
event loop.

The reader takes them itself (`read`), or they leave by a relay that it shares with others
(`token_relay`); the end is always left for the reader.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from deployments.engine.outputs import RequestOutput
from deployments.protocol import TokenChunk, TokenLogprobs, TokenRun


class Relay(Protocol):
    """A way for tokens to leave that is not the stream's own reader."""

    def note(self, stream: TokenStream) -> None:
        """This stream has tokens to take."""
        ...


class Usher(Protocol):
    """Decides how the tokens of a stream leave, for the one who reads it."""

    def lead(self, stream: TokenStream) -> None:
        """The reader is about to wait for more than the first chunk."""
        ...

    def part(self, stream: TokenStream) -> None:
        """The reader has left."""
        ...


class NoUsher:
    """All tokens leave by the reader. See Usher."""

    def lead(self, stream: TokenStream) -> None:
        """See Usher."""

    def part(self, stream: TokenStream) -> None:
        """See Usher."""


class TokenStream:
    """A mailbox with one reader.

    Args:
        request_id: whose tokens these are.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_closed = False
        """Whether its reader has left for good."""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._last: RequestOutput | None = None
        self._num_cached_tokens = 0
        self._num_taken = 0
        self._arrived = asyncio.Event()
        self._relay: Relay | None = None
        self._unread_since_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the last output is in, read or not."""
        return self._last is not None

    def is_abandoned(self, now: float, limit_s: float) -> bool:
        """Whether what is in it has waited for more than `limit_s` seconds."""
        since_s = self._unread_since_s
        return since_s is not None and not self.is_closed and now - since_s > limit_s

    def put(self, output: RequestOutput, now: float) -> None:
        """Add what a step produced."""
        if output.token_id is not None:
            self._token_ids.append(output.token_id)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._num_cached_tokens = output.num_cached_tokens
        if self._unread_since_s is None:
            self._unread_since_s = now
        if output.finish_reason is not None:
            self._last = output
            self._arrived.set()
        elif self._relay is not None:
            self._relay.note(self)
        else:
            self._arrived.set()

    def board(self, relay: Relay) -> None:
        """From now on tokens leave by `relay`; `read` waits for the end, or for `leave`."""
        self._relay = relay
        if self._token_ids and not self.has_ended:
            self._arrived.clear()
            relay.note(self)

    def leave(self) -> None:
        """From now on `read` gives all there is again."""
        self._relay = None
        if self._token_ids:
            self._arrived.set()

    async def read(self) -> TokenChunk:
        """Wait until something is there, then take all of it as one chunk."""
        await self._arrived.wait()
        self._arrived.clear()
        num_preceding, token_ids, logprobs = self._take()
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        last = self._last
        return TokenChunk(
            request_id=self.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if last is None else last.finish_reason,
            stop_token_id=None if last is None else last.stop_token_id,
            num_cached_tokens=self._num_cached_tokens,
            timings=None if last is None else last.timings,
            error=None if last is None else last.error,
            num_preceding=num_preceding,
        )

    def take_run(self, key: int) -> TokenRun | None:
        """All tokens there are, for a relay; None if they have left otherwise meanwhile."""
        if not self._token_ids or self.is_closed:
            return None
        return TokenRun(key, *self._take())

    def _take(self) -> tuple[int, list[int], list[TokenLogprobs] | None]:
        num_preceding = self._num_taken
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        self._num_taken += len(token_ids)
        self._unread_since_s = None
        return num_preceding, token_ids, logprobs or None
