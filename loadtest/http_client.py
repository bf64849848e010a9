"""A client that costs little: keep-alive connections, requests written before the run, answers
counted and not parsed.

Speaks HTTP/1.1 alone, with Content-Length or chunked answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens, and the path that is asked."""

    host: str
    port: int
    path: str

    def post(self, body: Mapping[str, Any], keep_alive: bool = True) -> bytes:
        """The bytes of a request."""
        content = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: its status, and how many server-sent events."""

    status: int
    num_events: int


class Connection:
    """One connection at a time, one request at a time.

    Args:
        address: where the requests go.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> Answer:
        """Send a request and read its answer to the end.

        A kept connection that was closed meanwhile (HAProxy does so when it reloads) is opened
        again, once.

        Raises:
            OSError: nobody listens.
            IncompleteReadError: the connection broke.
        """
        if self._streams is not None:
            try:
                return await self._ask(request)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
        self.close()
        self._streams = await asyncio.open_connection(self._address.host, self._address.port)
        return await self._ask(request)

    async def _ask(self, request: bytes) -> Answer:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        _, has_length, rest = head.partition(b"content-length:")
        if has_length:
            body = await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
            return Answer(status, body.count(b"data: "))
        return Answer(status, await _count_events(reader))

    def close(self) -> None:
        """Leave."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _count_events(reader: asyncio.StreamReader) -> int:
    num_events = 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        num_events += (await reader.readexactly(size + 2)).count(b"data: ")
    await reader.readexactly(2)
    return num_events
