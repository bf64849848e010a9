"""The thread and the bridge to asyncio: what a reader sees while all goes well."""

from __future__ import annotations

import asyncio

import pytest
from doubles import PagedFakeExecutor, ScriptedExecutor, make_limits, make_request, oracle_tokens
from thread_tools import (
    GatedExecutor,
    all_free,
    answered,
    eventually,
    has_unread,
    read_all,
    running,
    tokens_of,
)

from deployments.engine.clock import VirtualClock
from deployments.engine.engine_thread import EngineThread
from deployments.protocol import ErrorKind, FinishReason, TokenChunk

LIMITS = make_limits(num_blocks=400, block_size=4)


def test_each_reader_gets_its_own_tokens() -> None:
    """B73: iterating one request swallows tokens of another, or repeats or reorders its own."""
    requests = [make_request(5 + number, max_tokens=3 + number) for number in range(16)]

    async def main(thread: EngineThread) -> None:
        answers = await asyncio.gather(*(read_all(thread, request) for request in requests))
        for request, chunks in zip(requests, answers, strict=True):
            assert tokens_of(chunks) == oracle_tokens(request, LIMITS)[0]
            assert {chunk.request_id for chunk in chunks} == {request.request_id}
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            last = chunks[-1]
            assert last.finish_reason is FinishReason.LENGTH and last.timings is not None
            assert last.error is None
        await eventually(lambda: all_free(thread))

    running(main, PagedFakeExecutor(LIMITS))


def test_a_refused_request_gets_an_error_and_others_go_on() -> None:
    """B13: a request the engine refuses ends the thread, or its reader waits for ever."""

    async def main(thread: EngineThread) -> None:
        good = make_request(5, max_tokens=6)
        reader = asyncio.create_task(read_all(thread, good))
        for bad in (
            make_request([]),
            make_request([10**6]),
            make_request([1.5]),
            make_request(999),
        ):
            (chunk,) = await read_all(thread, bad)
            assert chunk.finish_reason is FinishReason.ERROR and chunk.error is not None
            assert chunk.error.kind in (ErrorKind.INVALID, ErrorKind.CONTEXT_LENGTH)
        limits = make_limits(num_blocks=200)
        assert tokens_of(await reader) == oracle_tokens(good, limits)[0]
        thread.check_health()

    running(main, PagedFakeExecutor(make_limits(num_blocks=200)))


def test_closing_the_generator_aborts_and_frees_all_blocks() -> None:
    """B52: a client that left keeps its blocks, or its request is run to the end."""

    async def main(thread: EngineThread) -> None:
        chunks = thread.generate(make_request(20, max_tokens=10_000))
        assert tokens_of([await anext(chunks)])
        await chunks.aclose()
        await eventually(lambda: all_free(thread))
        assert thread.stats().num_finished == {"abort": 1}
        assert thread.stats().num_running == 0  # B70

    running(main, PagedFakeExecutor(make_limits(num_blocks=5000)))


def test_cancelling_the_reader_aborts() -> None:
    """B52: a reader cancelled while it waits leaves its request running."""

    async def main(thread: EngineThread) -> None:
        executor.close()
        reader = asyncio.create_task(read_all(thread, make_request(20, max_tokens=5000)))
        await eventually(executor.entered.is_set)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        executor.open()
        await eventually(lambda: thread.stats().num_finished.get("abort") == 1)
        assert all_free(thread)

    executor = GatedExecutor(make_limits(num_blocks=5000))
    running(main, executor)


def test_a_client_that_leaves_while_queued_is_never_run() -> None:
    """B58: a request whose client left in the queue is prefilled later, or another one is ended."""

    async def main(thread: EngineThread) -> None:
        first = asyncio.create_task(read_all(thread, make_request(4, "first", max_tokens=30)))
        await eventually(lambda: thread.stats().num_running == 1)
        queued = thread.generate(make_request(6, "queued"))
        waiting = asyncio.create_task(anext(queued))
        await asyncio.sleep(0)  # the task opens its stream
        executor.let_through(1)
        await eventually(lambda: thread.stats().num_waiting == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        executor.open()
        assert len(tokens_of(await first)) == 30
        assert "queued" not in executor.seen

    executor = GatedExecutor(make_limits(num_blocks=64))
    executor.let_through(1)
    running(main, executor, max_num_seqs=1)


def test_a_slow_reader_gets_what_piled_up_as_one_chunk() -> None:
    """Tokens of a reader that was away come one by one, or some are lost."""
    request = make_request(5, max_tokens=12)

    async def main(thread: EngineThread) -> None:
        chunks = thread.generate(request)
        first = await anext(chunks)
        assert len(first.token_ids) == 1
        executor.open()
        await answered(thread, request)
        rest = [chunk async for chunk in chunks]
        assert len(rest) == 1
        assert rest[0].finish_reason is FinishReason.LENGTH
        assert tokens_of([first, *rest]) == oracle_tokens(request, LIMITS)[0]

    executor = GatedExecutor(LIMITS)
    executor.let_through(1)
    running(main, executor)


def test_one_call_to_the_event_loop_a_step() -> None:
    """Each token wakes the event loop by itself, so that 64 streams cost 64 wake-ups a step."""

    async def main(thread: EngineThread) -> None:
        loop = asyncio.get_running_loop()
        calls = []
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a, **k: (calls.append(1), real(*a, **k))[1]
        requests = [make_request(4, max_tokens=20) for _ in range(8)]
        await asyncio.gather(*(read_all(thread, request) for request in requests))
        await eventually(lambda: all_free(thread))
        assert len(calls) <= thread.stats().num_steps

    running(main, PagedFakeExecutor(LIMITS))


def test_two_streams_of_one_id_do_not_mix() -> None:
    """B34: a second request of an id in use gets the first one's tokens, or ends it."""

    async def main(thread: EngineThread) -> None:
        first = make_request(5, "same", max_tokens=40)
        reader = thread.generate(first)
        chunks = [await anext(reader)]
        (refused,) = await read_all(thread, make_request(9, "same"))
        assert refused.error is not None and refused.error.kind is ErrorKind.INVALID
        executor.open()
        chunks += [chunk async for chunk in reader]
        assert tokens_of(chunks) == oracle_tokens(first, LIMITS)[0]

    executor = GatedExecutor(LIMITS)
    executor.let_through(1)
    running(main, executor)


def test_an_id_used_again_at_once_gets_nothing_of_the_request_before() -> None:
    """B34: an id is used again right after its client left, and the new stream gets the abort, or
    tokens, of the old one."""

    async def main(thread: EngineThread) -> None:
        for _ in range(200):
            old = thread.generate(make_request(5, "same", max_tokens=500))
            await anext(old)
            await old.aclose()
            new = make_request([3, 4], "same", max_tokens=3)
            chunks = await read_all(thread, new)
            if chunks[-1].error is None:
                assert tokens_of(chunks) == oracle_tokens(new, LIMITS)[0]
                assert chunks[-1].finish_reason is FinishReason.LENGTH
            else:
                assert (
                    chunks[-1].error.kind is ErrorKind.INVALID
                )  # in use still: refused, not mixed
            await eventually(lambda: all_free(thread))

    running(main, PagedFakeExecutor(LIMITS))


def test_two_hundred_streams_closed_at_once_leave_nothing() -> None:
    """B59: an abort storm ends the thread, or leaves requests running."""

    async def main(thread: EngineThread) -> None:
        for _ in range(20):
            streams = [thread.generate(make_request(6, max_tokens=1000)) for _ in range(200)]
            await asyncio.gather(*(anext(stream) for stream in streams[:10]))
            waiting = [asyncio.create_task(anext(stream)) for stream in streams[10:]]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.gather(*(stream.aclose() for stream in streams))
            await eventually(lambda: all_free(thread))
            await eventually(lambda: not thread._streams)
        thread.check_health()

    running(main, PagedFakeExecutor(LIMITS), max_num_seqs=16)


def test_a_reader_that_vanished_is_aborted() -> None:
    """A stream that nobody reads or closes holds its blocks to its end."""
    clock = VirtualClock()

    async def main(thread: EngineThread) -> None:
        stream = thread.generate(make_request(4, max_tokens=5000))
        await anext(stream)
        await eventually(lambda: has_unread(thread))
        clock.advance(301.0)
        await eventually(lambda: thread.stats().num_finished.get("abort") == 1)
        await stream.aclose()

    running(main, PagedFakeExecutor(make_limits(num_blocks=5000)), clock=clock)


def test_tokens_and_logprobs_end_together() -> None:
    """The last chunk does not say which stop token ended it, or how much was cached."""

    async def main(thread: EngineThread) -> None:
        request = make_request(9, "r", max_tokens=9, stop_token_ids=(7,))
        last: TokenChunk = (await read_all(thread, request))[-1]
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 7)

    running(main, ScriptedExecutor({"r": [5, 6, 7, 8]}))


def test_a_held_batch_starts_when_enough_tokens_came() -> None:
    """2.4: an idle engine that waits for more prompts does not notice that they came."""

    async def main(thread: EngineThread) -> None:
        small = asyncio.create_task(read_all(thread, make_request(4, max_tokens=1)))
        await eventually(lambda: thread.stats().num_waiting == 1)
        assert thread.stats().num_steps == 0
        await read_all(thread, make_request(20, max_tokens=1))
        await small

    running(main, PagedFakeExecutor(LIMITS), min_batch_tokens=20, batch_timeout_ms=1e7)
