"""Requests leave when they are due, no more at once than allowed, and none is forgotten."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from loadtest.client import Answer, Ask
from loadtest.load_run import EndedRequest, LoadRun, PlannedRequest
from loadtest.stream_reader import AnswerFault


class GatedSender:
    """Answers when told to, or at once; knows how many were in flight together."""

    def __init__(self, is_open: bool = True) -> None:
        self.gate = asyncio.Event()
        self.num_in_flight = self.max_in_flight = self.num_sent = 0
        if is_open:
            self.gate.set()

    async def send(self, ask: Ask) -> Answer:
        self.num_sent += 1
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        sent_s = time.monotonic()
        await asyncio.sleep(0)
        await self.gate.wait()
        self.num_in_flight -= 1
        return Answer(sent_s, time.monotonic(), None, AnswerFault("status 500", ""))


def planned(*due_s: float | None) -> Iterator[PlannedRequest]:
    return (PlannedRequest(Ask(str(number), 1), 1, due) for number, due in enumerate(due_s))


async def turns(count: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """A slow server slows the load down that it is measured by."""

    async def scene() -> None:
        sender, ended = GatedSender(is_open=False), list[EndedRequest]()
        run = LoadRun(sender, ended.append)
        task = asyncio.ensure_future(run.run(planned(0.0, 0.0, 0.0)))
        await turns()
        assert (sender.num_sent, run.num_in_flight, ended) == (3, 3, [])
        sender.gate.set()
        await task
        assert len(ended) == 3 and run.num_in_flight == 0

    asyncio.run(scene())


def test_a_closed_loop_keeps_its_bound_and_sends_everything() -> None:
    """More are in flight than allowed, or the load stops before its end."""

    async def scene() -> None:
        sender, ended = GatedSender(), list[EndedRequest]()
        await LoadRun(sender, ended.append, max_concurrency=3).run(planned(*[None] * 20))
        assert (sender.max_in_flight, len(ended)) == (3, 20)
        assert all(end.answer.sent_s - end.intended_s < 0.1 for end in ended)

    asyncio.run(scene())


def test_waiting_for_room_counts_as_lag_of_a_request_that_was_due() -> None:
    """A bound on concurrency hides how late requests were sent (coordinated omission)."""

    async def scene() -> None:
        sender, ended = GatedSender(is_open=False), list[EndedRequest]()
        run = LoadRun(sender, ended.append, max_concurrency=1)
        task = asyncio.ensure_future(run.run(planned(0.0, 0.0)))
        await turns()
        opened_s = time.monotonic()
        sender.gate.set()
        await task
        first, second = ended
        assert first.intended_s == second.intended_s == run.start_s
        assert second.answer.sent_s >= opened_s

    asyncio.run(scene())


def test_requests_leave_at_their_times() -> None:
    """A replay ignores its trace's times, or sends before them."""

    async def scene() -> None:
        ended = list[EndedRequest]()
        run = LoadRun(GatedSender(), ended.append)
        await run.run(planned(0.0, 0.02, 0.05))
        assert [end.intended_s - run.start_s for end in ended] == pytest.approx([0.0, 0.02, 0.05])
        assert all(end.answer.sent_s >= end.intended_s for end in ended)

    asyncio.run(scene())


def test_an_interrupted_run_keeps_what_has_ended_and_leaves_the_rest() -> None:
    """Ctrl-C waits for the slowest answer, or counts requests as failed that were cut off by it."""

    async def scene() -> None:
        sender, ended = GatedSender(), list[EndedRequest]()
        run = LoadRun(sender, ended.append)
        task = asyncio.ensure_future(run.run(planned(0.0, 0.0, 3600.0)))
        await turns()
        assert len(ended) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(ended), run.num_in_flight) == (2, 0)

    asyncio.run(scene())


def test_nothing_is_held_of_requests_that_have_ended() -> None:
    """A run of hours grows with every request that it has sent."""
    held = []

    def count() -> int:
        gc.collect()
        return sum(isinstance(each, PlannedRequest) for each in gc.get_objects())

    def look(ended: EndedRequest) -> None:
        if ended.planned.ask.prompt in ("500", "1500"):
            held.append(count() - num_before)

    num_before = count()
    run = LoadRun(GatedSender(), look, max_concurrency=4)
    asyncio.run(run.run(planned(*[None] * 2000)))
    assert len(held) == 2 and max(held) <= 4 + 2


def test_a_fault_of_the_listener_ends_the_run() -> None:
    """A result that cannot be recorded is lost in silence."""

    def refuse(_: EndedRequest) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(_run_with(refuse))


async def _run_with(on_end: object) -> None:
    assert callable(on_end)
    await LoadRun(GatedSender(), on_end).run(planned(0.0, 0.0, None))
