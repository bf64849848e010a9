"""What a token costs on its way from the engine to its client, without Ray and without a socket.

Composes the product's own parts in one process, each as it is when served:

    engine thread -> TokenStream -> TokenRelay -> pickled, as a handle does -> RelayReader
      -> TokenMailbox -> detokenizer, stop strings, counters -> event -> ASGI send

The figure is the CPU time of the process in a window in which all streams run, the scheduler's part
included. What Serve, its proxy and the kernel take comes on top (`bench serve` measures that).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from starlette.types import Message

from deployments.config import CacheConfig, SchedulerConfig, ServiceConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineThread
from deployments.engine.token_relay import TokenRelays
from deployments.protocol import EngineStats, GenerateRequest, ModelCard, Seat, TokenChunk, TokenRun
from loadtest.stub_app import StubExecutor
from serve_app.handle_call import StreamingCall
from serve_app.ingress import make_api
from serve_app.metrics import PoolMetrics
from serve_app.relay_reader import RelayReader
from serve_app.token_mailbox import TokenMailbox

NUM_STEPS = 60
FIRST_SHARE, LAST_SHARE = 0.3, 0.9
"""Of all events; the window is between."""
STEP_US_PER_STREAM = 200
"""A step is paced so long that nothing piles up: idle time does not count."""
REPLICA = "one"


class _Carried:
    """A relay as a handle brings it: each item through pickle. See StreamingCall."""

    def __init__(self, items: AsyncGenerator[list[TokenRun], None]) -> None:
        self._items = items

    async def __aiter__(self) -> AsyncIterator[list[TokenRun]]:
        async for runs in self._items:
            yield pickle.loads(pickle.dumps(runs))

    def cancel(self) -> object:
        """See StreamingCall."""
        return None


class InProcessPool:
    """A backend over an engine thread in this process, whose tokens leave by a relay.

    Args:
        executor: the model's stand-in.
        num_streams: at once.
    """

    def __init__(self, executor: StubExecutor, num_streams: int) -> None:
        scheduler = SchedulerConfig(max_num_seqs=num_streams, max_num_batched_tokens=65_536)
        clock = WallClock()
        engine = Engine.build(scheduler, CacheConfig(), cast(Any, executor), clock)
        self._card = executor.model_card()
        self._thread = EngineThread(engine, clock, stuck_after_s=60.0)
        self._relays = TokenRelays()
        self._reader = RelayReader(
            lambda opening: cast(
                StreamingCall[list[TokenRun]], _Carried(self._relays.carry(opening.reader))
            )
        )
        self._thread.start()

    def stop(self) -> None:
        """End the engine."""
        self._thread.stop()

    async def model_card(self) -> ModelCard:
        """See Backend."""
        return self._card

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend."""
        mailbox = TokenMailbox(request.request_id)
        seat = self._reader.sit(mailbox)
        reading = asyncio.ensure_future(self._fill(mailbox, request, seat))
        async for chunk in mailbox:
            yield chunk
        await reading
        self._reader.leave(seat)

    async def _fill(self, mailbox: TokenMailbox, request: GenerateRequest, seat: Seat) -> None:
        has_begun = False
        async for chunk in self._thread.generate(request, self._relays.usher(seat)):
            if not has_begun:
                self._reader.ride(seat, REPLICA)
                has_begun = True
            mailbox.put(chunk)
        mailbox.end()

    async def stats(self) -> list[EngineStats]:
        """See Backend."""
        return [self._thread.stats()]

    async def metrics(self) -> PoolMetrics:
        """See Backend."""
        return PoolMetrics((), 0)

    async def check_health(self) -> None:
        """See Backend."""


class _Window:
    """CPU time between two counts of events."""

    def __init__(self, num_events: int) -> None:
        self._first, self._last = int(num_events * FIRST_SHARE), int(num_events * LAST_SHARE)
        self._num_seen = 0
        self._began_s = self._ended_s = 0.0

    def note(self) -> None:
        """One more event has left."""
        self._num_seen += 1
        if self._num_seen == self._first:
            self._began_s = time.process_time()
        elif self._num_seen == self._last:
            self._ended_s = time.process_time()

    @property
    def us_per_event(self) -> float:
        """Call once all events are through."""
        return (self._ended_s - self._began_s) * 1e6 / (self._last - self._first)


async def _ask(api: Any, body: bytes, window: _Window) -> None:
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.get_running_loop().create_future()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"a stream was answered with status {message['status']}")
        if message.get("body"):
            window.note()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"bench"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await api(scope, receive, send)


def measure_streaming(num_streams: int, num_steps: int = NUM_STEPS) -> float:
    """CPU microseconds of a step in which each of `num_streams` streams gets a token."""
    config = ServiceConfig()
    executor = StubExecutor(config, step_s=max(0.02, num_streams * STEP_US_PER_STREAM * 1e-6))
    asked = {"prompt": "Go on.", "max_tokens": num_steps, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    window = _Window(num_streams * num_steps)

    async def serve() -> None:
        pool = InProcessPool(executor, num_streams)
        api = make_api(pool, config)
        try:
            await asyncio.gather(*(_ask(api, body, window) for _ in range(num_streams)))
        finally:
            pool.stop()

    asyncio.run(serve())
    return window.us_per_event * num_streams
