"""However the engine thread ends, nobody is left waiting; and health tells dead and stuck from busy
and idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from doubles import FaultyExecutor, PagedFakeExecutor, make_engine, make_limits, make_request
from thread_tools import (
    BOUND_S,
    GatedExecutor,
    answered,
    eventually,
    frequent_switches,
    read_all,
    running,
)

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineDead, EngineThread
from deployments.engine.outputs import ModelOutput, RequestOutput, SchedulerOutput
from deployments.engine.scheduler import Scheduler, SchedulerStuck
from deployments.protocol import ErrorKind, FinishReason, TokenChunk

Patch = pytest.MonkeyPatch
LARGE = make_limits(num_blocks=1000)


class Broken(PagedFakeExecutor):
    """Raises the same thing in every step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        raise self._error


def raising(error: BaseException) -> Callable[..., object]:
    def call(*args: object) -> object:
        raise error

    return call


def break_schedule(patch: Patch) -> None:
    patch.setattr(Scheduler, "schedule", raising(SchedulerStuck("nothing can be scheduled")))


def break_update(patch: Patch) -> None:
    patch.setattr(Scheduler, "update_from_output", raising(KeyError("r")))


def break_add(patch: Patch) -> None:
    patch.setattr(Engine, "add", raising(TypeError("not a request")))


def break_hold(patch: Patch) -> None:
    patch.setattr(Engine, "find_hold_s", raising(ZeroDivisionError()))


def is_failure(chunk: TokenChunk, kind: ErrorKind) -> bool:
    ends = chunk.finish_reason is FinishReason.ERROR
    return ends and chunk.error is not None and chunk.error.kind is kind


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_base_exception_ends_every_stream_with_an_error(error: BaseException) -> None:
    """B62: the executor raises what `except Exception` lets through, and all readers wait for
    ever.
    """

    async def main(thread: EngineThread) -> None:
        requests = [make_request(4) for _ in range(4)]
        answers = await asyncio.gather(*(read_all(thread, request) for request in requests))
        assert all(is_failure(chunks[-1], ErrorKind.ENGINE) for chunks in answers)
        with pytest.raises(EngineDead):
            thread.check_health()
        late = (await read_all(thread, make_request(4)))[-1]
        assert is_failure(late, ErrorKind.UNAVAILABLE)

    running(main, Broken(error))


@pytest.mark.parametrize("damage", [break_schedule, break_update, break_add, break_hold])
def test_a_fault_of_the_engine_ends_every_stream_with_an_error(
    damage: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """B62: a fault outside the executor ends the thread, and all readers wait for ever."""
    damage(monkeypatch)

    async def main(thread: EngineThread) -> None:
        answers = await asyncio.gather(*(read_all(thread, make_request(4)) for _ in range(4)))
        for chunks in answers:
            kind = chunks[-1].error.kind
            assert kind in (ErrorKind.ENGINE, ErrorKind.UNAVAILABLE)
        with pytest.raises(EngineDead):
            thread.check_health()

    running(main)


def test_repeated_failures_end_the_engine_and_its_cause_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B62, B68: an engine that fails in every step is healthy, or its root cause is lost or
    repeated.
    """

    async def main(thread: EngineThread) -> None:
        for _ in range(3):
            await read_all(thread, make_request(4))
        with pytest.raises(EngineDead, match="device lost"):
            thread.check_health()
        for _ in range(20):
            await read_all(thread, make_request(4))

    running(main, Broken(RuntimeError("device lost")))
    assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 1
    assert len(caplog.records) <= 4


def test_one_failed_step_ends_its_requests_alone() -> None:
    """A single failed step ends the thread, or leaves its requests without an end."""

    async def main(thread: EngineThread) -> None:
        chunks = await read_all(thread, make_request(4))
        assert is_failure(chunks[-1], ErrorKind.ENGINE)
        chunks = await read_all(thread, make_request(4))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        thread.check_health()

    running(main, FaultyExecutor(raise_in={0: RuntimeError("once")}))


def test_stop_while_running_ends_streams_with_an_error() -> None:
    """B65, B73: the replica stops and its readers wait for ever, or the thread never ends."""

    async def main(thread: EngineThread) -> None:
        streams = [thread.generate(make_request(4, max_tokens=10_000)) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(thread.stop)
        for stream in streams:
            chunks = [chunk async for chunk in stream]
            assert is_failure(chunks[-1], ErrorKind.UNAVAILABLE)
        late = (await read_all(thread, make_request(4)))[-1]
        assert is_failure(late, ErrorKind.UNAVAILABLE)
        with pytest.raises(EngineDead):
            thread.check_health()
        thread.stop()

    running(main, PagedFakeExecutor(LARGE))


def test_stop_wakes_an_idle_thread_and_one_that_holds_a_batch() -> None:
    """A thread that waits for requests, or for more prompts, cannot be stopped."""

    async def main(thread: EngineThread) -> None:
        reader = asyncio.create_task(read_all(thread, make_request(4)))
        await eventually(lambda: thread.stats().num_waiting == 1)
        await asyncio.to_thread(thread.stop)
        assert is_failure((await reader)[-1], ErrorKind.UNAVAILABLE)

    running(main, min_batch_tokens=100, batch_timeout_ms=1e7)


def test_stop_before_start_is_no_error() -> None:
    """A replica whose loading failed hangs when it is stopped."""
    clock = VirtualClock()
    EngineThread(make_engine(clock=clock), clock, stuck_after_s=1.0).stop()


def test_a_thread_that_does_not_end_is_reported() -> None:
    """Stopping waits for ever for a step that hangs."""

    async def main(thread: EngineThread) -> None:
        executor.close()
        reader = asyncio.create_task(read_all(thread, make_request(4)))
        await eventually(executor.entered.is_set)
        with pytest.raises(TimeoutError):
            thread.stop(timeout_s=0.01)
        executor.open()
        assert is_failure((await reader)[-1], ErrorKind.UNAVAILABLE)

    executor = GatedExecutor()
    running(main, executor)


def test_many_submits_race_with_the_end_and_all_get_an_answer() -> None:
    """A request that comes in the moment the thread ends waits for ever."""

    async def submit_and_stop(delay: int) -> None:
        clock = VirtualClock()
        thread = EngineThread(make_engine(clock=clock), clock, stuck_after_s=100.0)
        thread.start()
        readers = [asyncio.create_task(read_all(thread, make_request(4))) for _ in range(4)]
        for _ in range(delay % 5):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
        while not stopping.done():
            if len(readers) < 50:
                readers.append(asyncio.create_task(read_all(thread, make_request(4))))
            await asyncio.sleep(0)
        for chunks in await asyncio.wait_for(asyncio.gather(*readers), BOUND_S):
            assert chunks[-1].finish_reason is not None

    async def main() -> None:
        for delay in range(50):
            await submit_and_stop(delay)

    with frequent_switches():
        asyncio.run(main())


def test_a_stuck_engine_is_unhealthy_and_a_working_one_is_not() -> None:
    """B62: an engine that hangs in a step is healthy; or one that is busy or idle is replaced."""
    clock = VirtualClock()

    async def main(thread: EngineThread) -> None:
        clock.advance(1000.0)
        thread.check_health()  # idle for long
        executor.close()
        reader = asyncio.create_task(read_all(thread, make_request(4)))
        await eventually(executor.entered.is_set)
        thread.check_health()  # work came only now
        clock.advance(99.0)
        thread.check_health()
        clock.advance(2.0)
        with pytest.raises(EngineDead, match="no step"):
            thread.check_health()
        executor.open()
        await reader
        thread.check_health()
        clock.advance(1000.0)
        thread.check_health()  # idle again

    executor = GatedExecutor()
    running(main, executor, clock=clock)


def test_an_answer_that_nobody_has_read_yet_is_no_stuck_engine() -> None:
    """B62: a client that reads its finished answer slowly gets the whole replica replaced."""
    clock = VirtualClock()

    async def main(thread: EngineThread) -> None:
        request = make_request(4, max_tokens=6)
        slow = thread.generate(request)
        await anext(slow)
        executor.open()
        await answered(thread, request)
        clock.advance(101.0)
        thread.check_health()
        executor.close()
        executor.entered.clear()
        reader = asyncio.create_task(read_all(thread, make_request(4)))
        await eventually(executor.entered.is_set)
        thread.check_health()  # work came only now
        executor.open()
        await reader
        await slow.aclose()

    executor = GatedExecutor()
    executor.let_through(1)
    running(main, executor, clock=clock)


def test_a_closed_event_loop_does_not_end_the_thread() -> None:
    """Outputs that come after the loop has closed end the engine with an error of its own."""
    executor = GatedExecutor(LARGE)
    clock = VirtualClock()
    engine = make_engine(executor, clock)
    thread = EngineThread(engine, clock, stuck_after_s=100.0)
    thread.start()

    async def leave() -> None:
        executor.close()
        stream = thread.generate(make_request(4, max_tokens=3))
        reader = asyncio.create_task(anext(stream))
        await eventually(executor.entered.is_set)
        reader.cancel()

    asyncio.run(leave())
    executor.open()
    thread.stop()
    assert thread._failure == "the replica is shutting down"


def test_outputs_for_nobody_are_dropped() -> None:
    """An output that comes after its reader left ends the event loop's callback, and others lose
    theirs.
    """

    async def main(thread: EngineThread) -> None:
        outputs = [RequestOutput("nobody", token_id=1)]
        thread._deliver(outputs)
        assert (await read_all(thread, make_request(4)))[-1].finish_reason is FinishReason.LENGTH

    running(main)
