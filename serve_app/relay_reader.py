"""The relays that this process reads: one stream from each replica that serves requests of it.

Owns when a relay is opened, and to whom its tokens go. A replica whose relay cannot be opened costs
nothing but speed: its requests' own streams carry everything.

    a request's first chunk names its replica   -> open a relay there, unless there is one
    the relay ends by itself                    -> all that was on it has been read
    it fails                                    -> what was on it may be lost, and is missed if so
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from deployments.protocol import OpenRelay, Seat, TokenRun
from serve_app.handle_call import StreamingCall, begin_call, end_call
from serve_app.token_mailbox import TokenMailbox

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0
"""A relay that is given up while it opens may have tokens on it, so this is long."""
BROKEN_S = 30.0
"""A replica whose relay failed gets no other for so long: longer than a chunk can be on its way
that was sent while the relay was there."""


class _Relay:
    """The relay of one replica: the requests that are there, and the task that reads it, if any."""

    def __init__(self) -> None:
        self.riders: dict[int, TokenMailbox] = {}
        self.reading: asyncio.Future[None] | None = None
        self.broken_s: float | None = None

    @property
    def is_broken(self) -> bool:
        """Whether it failed so lately that none is opened again."""
        return self.broken_s is not None and time.monotonic() - self.broken_s <= BROKEN_S

    def lose(self) -> None:
        """Nothing more comes by it."""
        self.reading = None
        for mailbox in self.riders.values():
            mailbox.lose_relay()


class RelayReader:
    """All relays of one pool.

    Args:
        open_relay: calls a replica's `relay`.
    """

    def __init__(self, open_relay: Callable[[OpenRelay], StreamingCall[list[TokenRun]]]) -> None:
        self._open_relay = open_relay
        self._reader = uuid.uuid4().hex
        self._last_key = 0
        self._mailboxes: dict[int, TokenMailbox] = {}
        """Of all seats: tokens may overtake the chunk that names the replica."""
        self._relays: dict[str, _Relay] = {}

    def sit(self, mailbox: TokenMailbox) -> Seat:
        """A seat for one call of a replica, whose tokens go to this mailbox until `leave`."""
        self._last_key += 1
        self._mailboxes[self._last_key] = mailbox
        return Seat(self._reader, self._last_key)

    def ride(self, seat: Seat, replica: str) -> None:
        """The call of this seat goes on at this replica: have a relay there. Tell it before the
        chunk that names the replica is put.
        """
        relay = self._relays.setdefault(replica, _Relay())
        mailbox = relay.riders[seat.key] = self._mailboxes[seat.key]
        if relay.reading is not None:
            mailbox.find_relay()
        elif not relay.is_broken:
            relay.broken_s = None
            relay.reading = asyncio.ensure_future(self._read(replica, relay))
            for rider in relay.riders.values():
                rider.find_relay()

    def leave(self, seat: Seat) -> None:
        """The call of this seat has ended."""
        del self._mailboxes[seat.key]
        for replica, relay in list(self._relays.items()):
            relay.riders.pop(seat.key, None)
            if relay.reading is None and not relay.riders and not relay.is_broken:
                del self._relays[replica]

    async def _read(self, replica: str, relay: _Relay) -> None:
        try:
            await self._read_to_end(OpenRelay(self._reader, replica))
        except Exception as error:
            # It costs speed alone: what the end of a replica means, its requests' own streams tell.
            logger.info("the relay of replica %s failed: %r", replica, error)
            relay.broken_s = time.monotonic()
        finally:
            relay.lose()

    async def _read_to_end(self, opening: OpenRelay) -> None:
        call = begin_call(lambda: self._open_relay(opening))
        try:
            items = aiter(call)
            await asyncio.wait_for(anext(items), OPEN_TIMEOUT_S)
            async for runs in items:
                self._deliver(runs)
        except BaseException:
            await end_call(call)
            raise

    def _deliver(self, runs: list[TokenRun]) -> None:
        for run in runs:
            mailbox = self._mailboxes.get(run.key)
            if mailbox is not None:
                mailbox.put_run(run)
