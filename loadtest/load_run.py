"""Sends planned requests when they are due: open loop, closed loop, or a trace's own times.

Owns who is in flight. Holds nothing of a request that has ended, so a run may last for hours; an
open loop against a server that cannot keep up does hold what is in flight, which is what an open
loop means (`max_concurrency` bounds it). Does not know prompts, or what the ends come to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from loadtest.client import Answer, Ask


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request and when it is due.

    Args:
        ask: what is sent.
        num_prompt_tokens: as the workload counts them.
        due_s: seconds from the start of the run; None: as soon as there is room (closed loop).
    """

    ask: Ask
    num_prompt_tokens: int
    due_s: float | None


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, well or not; `answer` has times of `time.monotonic()`.

    `intended_s`, of the same clock, is when it was due, or when there was room for it if it had no
    time of its own. What lies between it and `answer.sent_s` is the client's lag.
    """

    planned: PlannedRequest
    intended_s: float
    answer: Answer


class Sender(Protocol):
    """`Client`, or a test's stand-in."""

    async def send(self, ask: Ask) -> Answer:
        """Send a request and read its answer to the end; faults are answers."""


class LoadRun:
    """One run of planned requests.

    Args:
        sender: sends them.
        on_end: called with each request that has ended, in order of their ends.
        max_concurrency: so many are in flight at most; None: no bound. A request that is due and
            finds no room waits for it, and the wait counts as its lag: it is not forgotten.
    """

    def __init__(
        self,
        sender: Sender,
        on_end: Callable[[EndedRequest], None],
        max_concurrency: int | None = None,
    ) -> None:
        self._sender = sender
        self._on_end = on_end
        self._room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.start_s = 0.0
        """When the run began, by `time.monotonic()`."""

    @property
    def num_in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._tasks)

    async def run(self, planned: Iterable[PlannedRequest]) -> None:
        """Send all of them and wait for their ends.

        `planned` is read one ahead, as the requests become due, so it may make its prompts on the
        way. Cancelled, the run leaves what is in flight without reporting it.

        Raises:
            Exception: whatever `planned` or `on_end` raised; requests in flight are left.
        """
        self.start_s = time.monotonic()
        try:
            for request in planned:
                intended_s = await self._wait_for_turn(request)
                task = asyncio.ensure_future(self._send(request, intended_s))
                self._tasks.add(task)
                task.add_done_callback(self._forget)
                self._raise_failure()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._raise_failure()
        finally:
            await self._leave_all()

    async def _wait_for_turn(self, request: PlannedRequest) -> float:
        if request.due_s is None:
            if self._room is not None:
                await self._room.acquire()
            return time.monotonic()
        due_s = self.start_s + request.due_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if self._room is not None:
            await self._room.acquire()
        return due_s

    async def _send(self, request: PlannedRequest, intended_s: float) -> None:
        try:
            answer = await self._sender.send(request.ask)
        finally:
            if self._room is not None:
                self._room.release()
        self._on_end(EndedRequest(request, intended_s, answer))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        self._failure = self._failure or failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _leave_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
