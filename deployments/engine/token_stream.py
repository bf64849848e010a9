"""What waits for the reader of one request: its tokens pile up here until it looks. Belongs to one
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deployments.engine.outputs import RequestOutput
from deployments.protocol import TokenChunk, TokenLogprobs


class TokenStream:
    """A mailbox with one reader.

    Args:
        request_id: whose tokens these are.
        now: seconds on the engine's clock.
    """

    def __init__(self, request_id: str, now: float) -> None:
        self.request_id = request_id
        self.is_closed = False
        """Whether its reader has left for good."""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._last: RequestOutput | None = None
        self._num_cached_tokens = 0
        self._arrived = asyncio.Event()
        self._is_awaited = False
        self._last_read_s = now

    @property
    def has_ended(self) -> bool:
        """Whether the last output is in, read or not."""
        return self._last is not None

    def is_abandoned(self, now: float, limit_s: float) -> bool:
        """Whether nobody has read or awaited it for `limit_s` seconds."""
        return not self._is_awaited and not self.is_closed and now - self._last_read_s > limit_s

    def put(self, output: RequestOutput) -> None:
        """Add what a step produced."""
        if output.token_id is not None:
            self._token_ids.append(output.token_id)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self._last = output
        self._arrived.set()

    async def read(self, now: Callable[[], float]) -> TokenChunk:
        """Wait until something is there, then take all of it as one chunk."""
        self._is_awaited = True
        try:
            await self._arrived.wait()
        finally:
            self._is_awaited = False
        self._arrived.clear()
        self._last_read_s = now()
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        last = self._last
        return TokenChunk(
            request_id=self.request_id,
            token_ids=token_ids,
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if last is None else last.finish_reason,
            stop_token_id=None if last is None else last.stop_token_id,
            num_cached_tokens=self._num_cached_tokens,
            timings=None if last is None else last.timings,
            error=None if last is None else last.error,
        )
