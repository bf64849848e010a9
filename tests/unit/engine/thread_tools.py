"""An engine thread under test: started over an executor, stopped whatever happens, waited for with
a bound.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from doubles import PagedFakeExecutor, make_engine, make_limits

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import StepExecutor
from deployments.engine.engine_thread import EngineThread
from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.protocol import GenerateRequest, TokenChunk

BOUND_S = 30.0


class GatedExecutor(PagedFakeExecutor):
    """Waits in each step until the gate is open, or for a step that was let through."""

    def __init__(self, limits: ModelLimits | None = None) -> None:
        super().__init__(limits or make_limits())
        self.entered = threading.Event()
        self.seen: set[str] = set()
        self._condition = threading.Condition()
        self._is_open = True
        self._num_let_through = 0

    def close(self) -> None:
        """Let no further step through."""
        self._is_open = False

    def let_through(self, num_steps: int) -> None:
        """Close the gate behind so many steps."""
        with self._condition:
            self._is_open = False
            self._num_let_through += num_steps
            self._condition.notify_all()

    def open(self) -> None:
        """Let everything through."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        self.seen |= {row.request.request_id for row in output.scheduled}
        self.entered.set()
        with self._condition:
            passed = self._condition.wait_for(
                lambda: self._is_open or self._num_let_through > 0, BOUND_S
            )
            assert passed, "the gate was left closed"
            self._num_let_through -= not self._is_open
        return super().execute(output)


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads take turns fifty times as often: more races are met, and less time is waited."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def eventually(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds, polling it; fails after BOUND_S."""
    deadline = time.monotonic() + BOUND_S
    while not is_true():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.001)


def running(
    main: Callable[[EngineThread], Awaitable[None]],
    executor: StepExecutor | None = None,
    clock: VirtualClock | None = None,
    stuck_after_s: float = 100.0,
    **settings: object,
) -> None:
    """Run `main` over a started thread, and stop the thread after it."""
    clock = clock or VirtualClock()
    engine = make_engine(executor, clock, **settings)
    thread = EngineThread(engine, clock, stuck_after_s=stuck_after_s)
    thread.start()
    try:
        with frequent_switches():
            asyncio.run(asyncio.wait_for(main(thread), BOUND_S))
    finally:
        if isinstance(executor, GatedExecutor):
            executor.open()
        thread.stop()


async def read_all(thread: EngineThread, request: GenerateRequest) -> list[TokenChunk]:
    """All chunks of a request."""
    return [chunk async for chunk in thread.generate(request)]


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def all_free(thread: EngineThread) -> bool:
    """Whether the engine holds nothing any more."""
    stats = thread.stats()
    is_idle = stats.num_running == stats.num_waiting == 0
    return is_idle and stats.num_free_blocks == stats.num_blocks


async def answered(thread: EngineThread, request: GenerateRequest) -> None:
    """Wait until all of an answer lies with its reader, read or not."""
    await eventually(lambda: thread._streams[request.request_id].has_ended)


def has_unread(thread: EngineThread) -> bool:
    """Whether tokens lie with a reader that has not looked."""
    return any(stream._unread_since_s is not None for stream in thread._streams.values())
