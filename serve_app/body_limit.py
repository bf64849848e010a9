"""A bound on the size of a request's body, kept while it comes.

Plain ASGI, so that streams pass untouched. Memory stays flat: a body that says it is too large is
not read at all, one that does not say is cut off at the bound.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError

logger = logging.getLogger(__name__)


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, declared or counted."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _declared_bytes(Headers(scope=scope)) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        counted = _CountedBody(receive, send, self._max_bytes)
        try:
            await self._app(scope, counted.receive, counted.send)
        except Exception as error:
            if not counted.is_cut_off:
                raise
            # The answer is 413 whatever the application made of the end of its body.
            logger.debug("a body was cut off at its bound: %s", type(error).__name__)
        if counted.is_cut_off:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = too_large(self._max_bytes).response()
        # The rest of the body is on its way; nobody will read it.
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def too_large(max_bytes: int) -> ApiError:
    """The answer to a body over the bound."""
    message = f"The body is larger than {max_bytes} bytes; send less, or in several requests."
    return ApiError(413, message, code="request_too_large")


def _declared_bytes(headers: Headers) -> int:
    declared = headers.get("content-length", "")
    # Anything else is the server's to refuse; if it does not, the body is counted all the same.
    return int(declared[:20]) if declared.isascii() and declared.isdigit() else 0


class _CountedBody:
    """The two ends of one request, until its body is over the bound: then the application can
    neither read on nor answer.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_answered = False
        self.is_cut_off = False

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ApiError: the body is over the bound.
        """
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            self.is_cut_off = not self._has_answered
            raise too_large(self._max_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on; dropped where another answer will follow."""
        if not self.is_cut_off:
            self._has_answered = True
            await self._send(message)
