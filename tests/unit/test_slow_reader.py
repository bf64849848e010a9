"""Clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_doubles import ScriptedBackend
from test_api_disconnect import TOKENIZER, Client

from deployments.config import parse_service_config
from serve_app.ingress import make_api
from serve_app.slow_reader import SlowReaderGuard

BOUND_S = 10.0


def test_a_client_that_takes_nothing_is_cut_off_and_its_request_ends() -> None:
    """A client that stops reading holds its request, and what piles up for it, for ever."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        client = Client({"prompt": "hi", "stream": True})

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        client.send = send  # type: ignore[method-assign]
        config = parse_service_config({"ingress": {"slow_reader_timeout_s": 0.02}})
        await asyncio.wait_for(client.call(make_api(backend, config), "2.4"), BOUND_S)
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


def test_a_slow_stream_is_no_slow_reader() -> None:
    """A client is cut off because the model, not the client, took long."""

    async def scenario() -> list[str]:
        sent: list[str] = []

        async def send(message: Any) -> None:
            sent.append(message)

        # The guard looks each time the event loop turns.
        with SlowReaderGuard(0.0) as guard:
            watched = guard.watch(send)
            await watched("first")
            for _ in range(100):
                await asyncio.sleep(0)
            await watched("last")
        assert not guard.has_fired
        return sent

    assert asyncio.run(scenario()) == ["first", "last"]


def test_a_cancellation_from_outside_stays_one() -> None:
    """A guard swallows the cancellation of a server that shuts down."""

    async def scenario() -> None:
        async def guarded() -> None:
            with SlowReaderGuard(1000.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(guarded())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
