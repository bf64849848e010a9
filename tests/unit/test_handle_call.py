"""Ending a call over a handle, wherever it is. No Ray."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator

import pytest

from serve_app.handle_call import begin_call, end_call


class ServeLikeCall:
    """A call as Serve's handles make them: `cancel` cancels the sending, or what was sent once a
    reader has been told of it; a cancelled reading cancels what it reads.
    """

    def __init__(self) -> None:
        self.sending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_running = False
        self._is_known = False

    def send(self) -> None:
        self.sending.set_result(None)
        self.is_running = True

    def cancel(self) -> None:
        self.sending.cancel()
        if self._is_known:
            self.is_running = False

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        await self.sending
        self._is_known = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_running = False
            raise
        return 1


async def read(call: ServeLikeCall) -> None:
    try:
        async for _ in call:
            pass
    except asyncio.CancelledError:
        await end_call(call)
        raise


@pytest.mark.parametrize("moment", ["while it is sent", "just after", "while it is read"])
def test_a_call_ends_with_its_reader(moment: str) -> None:
    """A client leaves in the moment in which its request was given to a replica: Serve's cancel
    does nothing then, and the replica generates to the end for nobody, its call open for ever.
    """

    async def scenario() -> ServeLikeCall:
        call = ServeLikeCall()
        reading = asyncio.ensure_future(read(call))
        await asyncio.sleep(0)
        if moment != "while it is sent":
            call.send()
        if moment == "while it is read":
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading}, timeout=5)
        assert reading.cancelled()
        return call

    call = asyncio.run(scenario())
    assert not call.is_running
    assert call.sending.cancelled() == (moment == "while it is sent")


def test_calls_of_one_request_are_told_apart() -> None:
    """Serve takes two calls within one HTTP request for one, and never sends the second."""
    request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="none")
    request_id.set("of the HTTP request")
    assert begin_call(request_id.get) == "none"
