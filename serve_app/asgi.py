"""What HTTP needs beside routes: noticing that a client left, closing its stream, echoing its
request id.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ClientDisconnected
from serve_app.slow_reader import SlowReaderGuard

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_ID_HEADER = "X-Request-Id"
MAX_REQUEST_ID_LENGTH = 128


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client leaves. Call once the body has been read.

    Raises:
        ClientDisconnected: the client left first; `work` has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected("the client left before its answer")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Their ends matter (generators closed), not their outcomes: nobody is left to be told.
        await asyncio.wait({working, watching})


async def _disconnected(request: Request) -> None:
    receive = _deaf_as_gone(request.receive)
    while (await receive())["type"] != "http.disconnect":
        pass


def _deaf_as_gone(receive: Receive) -> Receive:
    """A client that cannot be heard any more has left: Serve's receive raises when its proxy
    cancels a request.
    """

    async def receive_or_leave() -> Message:
        try:
            return await receive()
        except Exception as error:
            logger.debug("a client could not be heard any more: %r", error)
            return {"type": "http.disconnect"}

    return receive_or_leave


class Closable(Protocol):
    """What ends when it is closed; closing twice is no fault."""

    async def aclose(self) -> None: ...


class EventStream(StreamingResponse):
    """A response of server-sent events that closes what feeds it, whichever way it ends.

    Args:
        events: encoded events.
        source: what is behind them; closed too, since a generator that never started closes
            nothing.
        slow_reader_timeout_s: a client that takes nothing for so long is cut off.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: Closable, slow_reader_timeout_s: float
    ) -> None:
        # X-Accel-Buffering: a proxy that collects events before it passes them on defeats the
        # stream.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._source = source
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        try:
            with SlowReaderGuard(self._slow_reader_timeout_s) as guard:
                await super().__call__(scope, _deaf_as_gone(receive), guard.watch(send))
        finally:
            await self._events.aclose()
            await self._source.aclose()


class RequestIdMiddleware:
    """Gives every answer an X-Request-Id: the client's own, cut to a bounded length, or a fresh
    one.

    It is for the client's logs alone; requests are told apart inside by ids that no client chooses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the id back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id[
                    :MAX_REQUEST_ID_LENGTH
                ]
            await send(message)

        await self._app(scope, receive, send_with_id)
