"""The tokens of one request, put in order: they come by the request's own stream and by the relay
it shares with others (`deployments.engine.token_relay`), two connections that know no order.

Owns the order and what is missing; does not know Ray. Belongs to one event loop.

    own stream   [0]                      [7 8 end]
    relay             [1 2]  [3]  [4 5 6]
    read             ->  0 | 1 2 | 3 | 4 5 6 7 8 end      what piled up meanwhile comes as one chunk
"""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import replace

from deployments.protocol import TokenChunk, TokenRun


class TokensLost(Exception):
    """Tokens of an answer did not arrive, or arrived twice; says which."""


def _place(chunk: TokenChunk) -> int:
    return chunk.num_preceding


class TokenMailbox:
    """What arrives for one request, read by one reader: iterate until the last chunk.

    Args:
        request_id: whose tokens these are.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ready: list[TokenChunk] = []
        self._early: list[TokenChunk] = []
        """Behind a gap; in order."""
        self._num_tokens = 0
        self._has_ended = False
        self._has_relay = False
        self._failure: BaseException | None = None
        self._arrived = asyncio.Event()

    def put(self, chunk: TokenChunk) -> None:
        """A part by the own stream."""
        self._add(chunk)
        self._check_gap()

    def put_run(self, run: TokenRun) -> None:
        """A part by the relay; it may come before the first one of the own stream."""
        _, num_preceding, token_ids, logprobs = run
        self._add(TokenChunk(self._request_id, token_ids, logprobs, num_preceding=num_preceding))

    def find_relay(self) -> None:
        """From now on tokens may come by a relay: a gap may be filled."""
        self._has_relay = True

    def lose_relay(self) -> None:
        """Nothing more comes by the relay: a gap stays one."""
        self._has_relay = False
        self._check_gap()

    def end(self) -> None:
        """The own stream has ended; what the relay still owes is waited for."""
        self._has_ended = True
        self._check_gap()
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """Reading raises this, once what came before has been read; the first failure stays."""
        if self._failure is None:
            self._failure = error
        self._arrived.set()

    async def has_arrived(self, timeout_s: float) -> bool:
        """Wait until iterating gives something or ends, for so long at most."""
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def __aiter__(self) -> TokenMailbox:
        return self

    async def __anext__(self) -> TokenChunk:
        """Wait until something is there, then take all that is in order as one chunk.

        Raises:
            StopAsyncIteration: the own stream has ended.
            TokensLost: what came next never arrived, or arrived twice.
            BaseException: what `fail` was told.
        """
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._has_ended and not self._early:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        ready, self._ready = self._ready, []
        return ready[0] if len(ready) == 1 else _joined(ready)

    def _add(self, chunk: TokenChunk) -> None:
        if chunk.num_preceding == self._num_tokens:
            self._accept(chunk)
        elif chunk.num_preceding < self._num_tokens:
            self.fail(TokensLost(f"token {chunk.num_preceding} arrived twice"))
        else:
            insort(self._early, chunk, key=_place)

    def _accept(self, chunk: TokenChunk) -> None:
        self._ready.append(chunk)
        self._num_tokens += len(chunk.token_ids)
        while self._early and self._early[0].num_preceding <= self._num_tokens:
            self._add(self._early.pop(0))
        self._arrived.set()

    def _check_gap(self) -> None:
        if self._early and not self._has_relay:
            missing = range(self._num_tokens, self._early[0].num_preceding)
            self.fail(TokensLost(f"tokens {missing.start} to {missing.stop - 1} never arrived"))


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    """Chunks that follow one another as one: what the last says of the request holds."""
    logprobs = [row for chunk in chunks for row in chunk.logprobs or ()]
    prompt_logprobs = next((c.prompt_logprobs for c in chunks if c.prompt_logprobs), None)
    return replace(
        chunks[-1],
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=max(chunk.num_cached_tokens for chunk in chunks),
        num_preceding=chunks[0].num_preceding,
        replica=chunks[0].replica,
    )
