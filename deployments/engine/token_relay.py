"""One stream for all requests of one reader process: what a step gave to any of them is one item.

A message for each token of each request costs more than the token where many run. Owns which
streams ride and when they leave; what waits in one is `TokenStream`'s. Belongs to one event loop.

    own stream of request 1   [first chunk]  . . . . . . . . . . . . .  [last chunk]
    own stream of request 2     [first chunk]  . . . . . . . .  [last chunk]
    relay of their reader                     [1 2] [1 2] [1] [1 2] [1]

The first chunk of a request and its last one always travel on its own stream, which is what fails,
is retried and is cancelled. Both ways are separate connections: the reader puts the parts in order
by `num_preceding`. Without a relay everything travels on the own stream.

A relay ends here and not at its reader, at a moment when nobody rides: so whatever was put on it
has been read when the reader sees its end. A replica that drains is not held up by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from deployments.engine.token_stream import NoUsher, TokenStream, Usher
from deployments.protocol import Seat, TokenRun

IDLE_S = 1.0
"""A relay on which nobody rides ends after so long."""


class TokenRelay:
    """The streams of one reader, for as long as it listens.

    Args:
        idle_s: see IDLE_S.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._keys: dict[TokenStream, int] = {}
        self._ready: dict[TokenStream, None] = {}
        self._arrived = asyncio.Event()

    def admit(self, stream: TokenStream, key: int) -> None:
        """Let a stream ride; one that does already goes on."""
        if stream not in self._keys:
            self._keys[stream] = key
            self._arrived.set()
            stream.board(self)

    def dismiss(self, stream: TokenStream) -> None:
        """This stream has ended; no matter if it never rode."""
        if self._keys.pop(stream, None) is not None:
            self._ready.pop(stream, None)
            stream.leave()
            self._arrived.set()

    def note(self, stream: TokenStream) -> None:
        """See token_stream.Relay."""
        self._ready[stream] = None
        self._arrived.set()

    async def take(self) -> list[TokenRun]:
        """Wait until some stream has tokens, then take those of all; nothing if nobody has ridden
        for long.
        """
        while True:
            if not await self._wait() and not self._keys:
                return []
            self._arrived.clear()
            ready, self._ready = self._ready, {}
            runs = [stream.take_run(self._keys[stream]) for stream in ready]
            if kept := [run for run in runs if run is not None]:
                return kept

    async def _wait(self) -> bool:
        """Whether something happened."""
        try:
            await asyncio.wait_for(self._arrived.wait(), None if self._keys else self._idle_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def close(self) -> None:
        """All that ride go on by their own streams."""
        keys, self._keys = self._keys, {}
        self._ready = {}
        for stream in keys:
            stream.leave()


class TokenRelays:
    """The relays of a replica, by reader.

    Args:
        interval_s: least time between two items of a relay; meanwhile tokens pile up.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._relays: dict[str, TokenRelay] = {}

    async def carry(self, reader: str) -> AsyncGenerator[list[TokenRun], None]:
        """The relay of a reader, opened now and closed with this generator; the first item is empty
        and says that it is open. A reader that opens another leaves the one before.
        """
        relay = TokenRelay()
        before = self._relays.get(reader)
        self._relays[reader] = relay
        if before is not None:
            before.close()
        try:
            yield []
            while runs := await relay.take():
                yield runs
                if self._interval_s:
                    await asyncio.sleep(self._interval_s)
        finally:
            if self._relays.get(reader) is relay:
                del self._relays[reader]
            relay.close()

    def usher(self, seat: Seat | None) -> Usher:
        """Whoever leads the stream of one request to the relay of its reader."""
        return RelayUsher(self._relays, seat) if seat is not None else NoUsher()


class RelayUsher:
    """Leads one stream to the relay of its reader, whenever that is open. See Usher.

    Args:
        relays: those that are open, by reader.
        seat: of the request.
    """

    def __init__(self, relays: Mapping[str, TokenRelay], seat: Seat) -> None:
        self._relays = relays
        self._seat = seat

    def lead(self, stream: TokenStream) -> None:
        """See Usher."""
        relay = self._relays.get(self._seat.reader)
        if relay is not None:
            relay.admit(stream, self._seat.key)

    def part(self, stream: TokenStream) -> None:
        """See Usher."""
        relay = self._relays.get(self._seat.reader)
        if relay is not None:
            relay.dismiss(stream)
