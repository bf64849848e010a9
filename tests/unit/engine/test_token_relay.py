"""The stream that the requests of one reader share: everything arrives once, by one way or the
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from doubles import PagedFakeExecutor, make_limits, make_request, oracle_tokens
from thread_tools import BOUND_S, GatedExecutor, all_free, eventually, running

from deployments.engine.engine_thread import EngineThread
from deployments.engine.token_relay import TokenRelay, TokenRelays
from deployments.protocol import GenerateRequest, Seat, TokenChunk, TokenRun

LIMITS = make_limits(num_blocks=5000, block_size=4)


def in_loop(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), BOUND_S))


async def read_relay(relays: TokenRelays, reader: str, runs: list[TokenRun]) -> None:
    async with aclosing(relays.carry(reader)) as items:
        async for item in items:
            runs += item


async def read_own(
    thread: EngineThread, relays: TokenRelays, request: GenerateRequest, key: int
) -> list[TokenChunk]:
    chunks = thread.generate(request, relays.usher(Seat("reader", key)))
    return [chunk async for chunk in chunks]


def joined(chunks: list[TokenChunk], runs: list[TokenRun]) -> list[int]:
    """The tokens of both ways in order.

    Raises:
        AssertionError: one is missing, or there twice.
    """
    parts = sorted(
        [(c.num_preceding, c.token_ids) for c in chunks if c.token_ids]
        + [(run.num_preceding, run.token_ids) for run in runs]
    )
    tokens: list[int] = []
    for num_preceding, token_ids in parts:
        assert num_preceding == len(tokens)
        tokens += token_ids
    return tokens


def rides(relays: TokenRelays) -> bool:
    """Whether a stream was led to the relay."""
    return any(relay._keys for relay in relays._relays.values())


def test_tokens_of_many_requests_arrive_once_each() -> None:
    """A request that rides loses tokens, has some twice, or gets those of another."""
    requests = [make_request(5 + number, max_tokens=40 + number) for number in range(16)]

    async def main(thread: EngineThread) -> None:
        relays, runs = TokenRelays(), list[TokenRun]()
        reading = asyncio.create_task(read_relay(relays, "reader", runs))
        answers = await asyncio.gather(
            *(read_own(thread, relays, request, key) for key, request in enumerate(requests))
        )
        await reading  # it ends when nobody rides
        for key, (request, chunks) in enumerate(zip(requests, answers, strict=True)):
            own = [run for run in runs if run.key == key]
            assert joined(chunks, own) == oracle_tokens(request, LIMITS)[0]
            assert own, "nothing travelled by the relay"
            assert len(chunks) < len(own) + 2
        await eventually(lambda: all_free(thread))

    running(main, PagedFakeExecutor(LIMITS))


def test_tokens_of_a_step_are_one_item() -> None:
    """Each token of each request is a message of its own, which costs more than the token."""

    async def main(thread: EngineThread) -> None:
        relays = TokenRelays()
        items = relays.carry("reader")
        assert await anext(items) == []
        requests = [make_request(4, f"r{key}", max_tokens=50) for key in range(8)]
        reads = [
            asyncio.create_task(read_own(thread, relays, request, key))
            for key, request in enumerate(requests)
        ]
        await eventually(lambda: len(relays._relays["reader"]._keys) == 8)
        executor.let_through(2)
        await eventually(lambda: len(relays._relays["reader"]._ready) == 8)
        item = await anext(items)
        assert {run.key for run in item} == set(range(8))
        executor.open()
        await items.aclose()
        await asyncio.gather(*reads)

    executor = GatedExecutor(LIMITS)
    executor.let_through(3)
    running(main, executor)


def test_without_a_relay_everything_comes_by_the_own_stream() -> None:
    """A reader that opened no relay never sees the tokens between the first and the last."""
    request = make_request(5, max_tokens=30)

    async def main(thread: EngineThread) -> None:
        chunks = await read_own(thread, TokenRelays(), request, 1)
        assert joined(chunks, []) == oracle_tokens(request, LIMITS)[0]

    running(main, PagedFakeExecutor(LIMITS))


def test_a_relay_that_is_closed_sends_its_riders_back() -> None:
    """A relay that broke takes the rest of every answer with it."""
    request = make_request(5, max_tokens=60)

    async def main(thread: EngineThread) -> None:
        relays = TokenRelays()
        items = relays.carry("reader")
        await anext(items)
        reading = asyncio.create_task(read_own(thread, relays, request, 1))
        await eventually(lambda: rides(relays))
        executor.let_through(3)
        runs = list(await anext(items))
        await items.aclose()
        executor.open()
        assert joined(await reading, runs) == oracle_tokens(request, LIMITS)[0]

    executor = GatedExecutor(LIMITS)
    executor.let_through(1)
    running(main, executor)


def test_a_rider_whose_reader_left_is_aborted_and_leaves_the_relay() -> None:
    """A client that left goes on being served because its tokens are read by the relay."""

    async def main(thread: EngineThread) -> None:
        relays, runs = TokenRelays(), list[TokenRun]()
        relaying = asyncio.create_task(read_relay(relays, "reader", runs))
        request = make_request(5, max_tokens=4000)
        reading = asyncio.create_task(read_own(thread, relays, request, 1))
        await eventually(lambda: len(runs) > 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await eventually(lambda: thread.stats().num_finished.get("abort") == 1)
        await relaying
        assert all_free(thread)

    running(main, PagedFakeExecutor(LIMITS))


def test_a_relay_ends_when_nobody_has_ridden_for_long() -> None:
    """A replica that drains waits for a stream that never ends."""

    async def main() -> None:
        relay = TokenRelay(idle_s=0.0)
        assert await relay.take() == []

    in_loop(main)


def test_a_second_relay_of_a_reader_replaces_the_first() -> None:
    """A reader that opened another after a failure leaves its riders on the dead one."""
    request = make_request(5, max_tokens=60)

    async def main(thread: EngineThread) -> None:
        relays, runs = TokenRelays(), list[TokenRun]()
        dead = relays.carry("reader")
        await anext(dead)
        reading = asyncio.create_task(read_own(thread, relays, request, 1))
        await eventually(lambda: rides(relays))
        executor.let_through(3)
        runs += await anext(dead)
        first = relays._relays["reader"]
        relaying = asyncio.create_task(read_relay(relays, "reader", runs))
        await eventually(lambda: relays._relays["reader"] is not first)
        executor.open()
        chunks = await reading
        await relaying
        await dead.aclose()
        assert joined(chunks, runs) == oracle_tokens(request, LIMITS)[0]

    executor = GatedExecutor(LIMITS)
    executor.let_through(1)
    running(main, executor)


def test_with_an_interval_tokens_pile_up_and_the_end_does_not_wait() -> None:
    """Streams cost an event per token where nobody wants them so often; or their end is late."""
    request = make_request(5, max_tokens=60)

    async def main(thread: EngineThread) -> None:
        relays, runs = TokenRelays(interval_s=3600.0), list[TokenRun]()
        relaying = asyncio.create_task(read_relay(relays, "reader", runs))
        chunks = await read_own(thread, relays, request, 1)
        assert len(runs) <= 1
        assert joined(chunks, runs) == oracle_tokens(request, LIMITS)[0]
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)

    running(main, PagedFakeExecutor(LIMITS))
