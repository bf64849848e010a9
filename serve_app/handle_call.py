"""A streaming call over a Serve handle: how it begins, and how it is ended before its time.

Owns what is particular about Serve's handles. What a call carries is its reader's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item", covariant=True)
Call = TypeVar("Call")


class StreamingCall(Protocol, Generic[Item]):
    """A running call; iterating again goes on where it was."""

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def cancel(self) -> object:
        """End it, if Serve knows already where it runs."""
        ...


def begin_call(call: Callable[[], Call]) -> Call:
    """Call a handle in a context of its own, so that Serve gives the call an id of its own.

    Within one HTTP request all calls would share one, by which Serve's router tells calls apart:
    the second of two that are being routed would never be sent.
    """
    return contextvars.Context().run(call)


async def end_call(call: StreamingCall[object]) -> None:
    """End a call, wherever it is: being routed, just sent, or running.

    Serve's own cancel loses a call that was sent in this very moment, when its reader has not been
    told yet: the replica would go on to the end, read by nobody. So the call is read once more,
    which makes it known, and that reading is cancelled, which cancels what it reads.
    """
    call.cancel()
    reading = asyncio.ensure_future(_read_one(call))
    # It has begun by then.
    await asyncio.sleep(0)
    reading.cancel()
    # How a call ends that nobody reads any more is nobody's matter.
    await asyncio.gather(reading, return_exceptions=True)


async def _read_one(call: StreamingCall[object]) -> None:
    await anext(aiter(call), None)
