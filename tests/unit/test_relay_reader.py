"""The relays that an ingress process reads, over replicas that are scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from deployments.protocol import FinishReason, OpenRelay, TokenChunk, TokenRun
from serve_app.relay_reader import RelayReader
from serve_app.token_mailbox import TokenMailbox, TokensLost

FIRST = TokenChunk("a", [0], replica="r")
LAST = TokenChunk("a", [3], finish_reason=FinishReason.STOP, num_preceding=3)


class FakeRelays:
    """Each relay gives what is put into its queue: items, an error, or None for its end."""

    def __init__(self) -> None:
        self.openings: list[OpenRelay] = []
        self.queues: list[asyncio.Queue[list[TokenRun] | Exception | None]] = []
        self.num_cancelled = 0

    def open(self, opening: OpenRelay) -> FakeCall:
        self.openings.append(opening)
        self.queues.append(asyncio.Queue())
        self.queues[-1].put_nowait([])
        return FakeCall(self, self.queues[-1])


class FakeCall:
    def __init__(self, relays: FakeRelays, queue: asyncio.Queue) -> None:  # type: ignore[type-arg]
        self._relays = relays
        self._queue = queue

    def cancel(self) -> None:
        self._relays.num_cancelled += 1

    async def __aiter__(self) -> AsyncIterator[list[TokenRun]]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


def scenario(main: Callable[[FakeRelays, RelayReader], Awaitable[None]]) -> None:
    async def start() -> None:
        relays = FakeRelays()
        await asyncio.wait_for(main(relays, RelayReader(relays.open)), 10.0)

    asyncio.run(start())


async def settled() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def tokens_of(mailbox: TokenMailbox) -> list[int]:
    return [token async for part in mailbox for token in part.token_ids]


def test_requests_of_one_replica_share_a_relay() -> None:
    """Each request opens a stream of its own, or reads the tokens of another."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        boxes = [TokenMailbox(name) for name in "ab"]
        seats = [reader.sit(box) for box in boxes]
        for box, seat in zip(boxes, seats, strict=True):
            reader.ride(seat, "r")
            box.put(FIRST)
        await settled()
        assert [opening.replica for opening in relays.openings] == ["r"]
        assert relays.openings[0].reader == seats[0].reader == seats[1].reader
        runs = [TokenRun(seats[1].key, 1, [1, 2], None), TokenRun(seats[0].key, 1, [5, 6], None)]
        relays.queues[0].put_nowait(runs)
        await settled()
        for box in boxes:
            box.put(LAST)
            box.end()
        assert [await tokens_of(box) for box in boxes] == [[0, 5, 6, 3], [0, 1, 2, 3]]

    scenario(main)


def test_tokens_that_overtake_the_first_chunk_are_kept() -> None:
    """A relay that is open brings tokens of a request whose own stream is slower."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        reader.ride(reader.sit(TokenMailbox("b")), "r")
        await settled()
        box = TokenMailbox("a")
        seat = reader.sit(box)
        relays.queues[0].put_nowait([TokenRun(seat.key, 1, [1, 2], None)])
        await settled()
        reader.ride(seat, "r")
        box.put(FIRST)
        box.put(LAST)
        box.end()
        assert await tokens_of(box) == [0, 1, 2, 3]

    scenario(main)


def test_a_relay_that_breaks_fails_only_those_who_miss_tokens() -> None:
    """A broken relay leaves requests waiting for what never comes, or ends those it took nothing
    of."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        robbed, whole = TokenMailbox("a"), TokenMailbox("b")
        for box in (robbed, whole):
            seat = reader.sit(box)
            reader.ride(seat, "r")
            box.put(FIRST)
        await settled()
        relays.queues[0].put_nowait(ConnectionError("reset"))
        await settled()
        robbed.put(LAST)
        whole.put(TokenChunk("b", [1], finish_reason=FinishReason.STOP, num_preceding=1))
        whole.end()
        assert await tokens_of(whole) == [0, 1]
        assert (await anext(robbed)).token_ids == [0]
        with pytest.raises(TokensLost):
            await anext(robbed)
        assert relays.num_cancelled == 1

    scenario(main)


def test_a_first_chunk_that_comes_after_the_break_is_told() -> None:
    """A request whose tokens were on a relay that broke before it was known to ride there waits for
    ever."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        reader.ride(reader.sit(TokenMailbox("b")), "r")
        box = TokenMailbox("a")
        seat = reader.sit(box)
        await settled()
        relays.queues[0].put_nowait(ConnectionError("reset"))
        await settled()
        reader.ride(seat, "r")
        box.put(FIRST)
        box.put(LAST)
        assert (await anext(box)).token_ids == [0]
        with pytest.raises(TokensLost):
            await anext(box)
        assert len(relays.openings) == 1

    scenario(main)


def test_a_relay_that_ended_by_itself_is_opened_again() -> None:
    """After the first pause of the traffic every token is a message of its own."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        seat = reader.sit(TokenMailbox("a"))
        reader.ride(seat, "r")
        await settled()
        reader.leave(seat)
        relays.queues[0].put_nowait(None)
        await settled()
        reader.ride(reader.sit(TokenMailbox("b")), "r")
        await settled()
        assert len(relays.openings) == 2
        assert relays.num_cancelled == 0

    scenario(main)


def test_tokens_of_a_request_that_left_are_dropped() -> None:
    """A token that was on its way when its client left ends the relay of all others."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        seat, other = reader.sit(TokenMailbox("a")), TokenMailbox("b")
        reader.ride(seat, "r")
        staying = reader.sit(other)
        reader.ride(staying, "r")
        other.put(FIRST)
        await settled()
        reader.leave(seat)
        relays.queues[0].put_nowait([TokenRun(seat.key, 1, [9], None)])
        relays.queues[0].put_nowait([TokenRun(staying.key, 1, [1, 2], None)])
        await settled()
        other.put(LAST)
        other.end()
        assert await tokens_of(other) == [0, 1, 2, 3]

    scenario(main)


def test_a_request_goes_on_to_the_next_relay() -> None:
    """A request that was there when a relay ended takes the tokens of the next one for lost."""

    async def main(relays: FakeRelays, reader: RelayReader) -> None:
        box = TokenMailbox("a")
        seat = reader.sit(box)
        reader.ride(seat, "r")
        box.put(FIRST)
        await settled()
        relays.queues[0].put_nowait(None)
        await settled()
        reader.ride(reader.sit(TokenMailbox("b")), "r")
        await settled()
        box.put(LAST)
        relays.queues[1].put_nowait([TokenRun(seat.key, 1, [1, 2], None)])
        await settled()
        box.end()
        assert await tokens_of(box) == [0, 1, 2, 3]

    scenario(main)


def test_a_relay_that_cannot_be_called_leaves_the_own_stream() -> None:
    """Serve refuses the call of a relay: its request waits for tokens that nobody reads."""

    async def main(relays: FakeRelays, _reader: RelayReader) -> None:
        def refuse(_opening: OpenRelay) -> FakeCall:
            raise RuntimeError("no replica")

        reader, box = RelayReader(refuse), TokenMailbox("a")
        reader.ride(reader.sit(box), "r")
        box.put(FIRST)
        await settled()
        box.put(TokenChunk("a", [1], finish_reason=FinishReason.STOP, num_preceding=1))
        box.end()
        assert await tokens_of(box) == [0, 1]

    scenario(main)
