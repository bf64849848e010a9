"""The stub is a server that the client takes for a good one, and the ceiling counts all it says."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.bench_ceiling import run_bench
from loadtest.bench_serve import free_port
from loadtest.client import Answer, Ask, Client, Target
from loadtest.stub_openai import STUB_MODEL, StubConnection


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_the_stub_says_as_many_tokens_as_it_is_asked(endpoint: str) -> None:
    """The ceiling counts tokens that were never sent, or the stub stops when its reader is slow."""

    async def scene() -> list[Answer]:
        port = free_port()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(StubConnection, "127.0.0.1", port)
        target = Target(f"http://127.0.0.1:{port}", endpoint, STUB_MODEL)
        async with server, Client(target) as client:
            return [await client.send(Ask("word " * 5000, number)) for number in (1, 2, 5000)]

    answers = asyncio.run(scene())
    assert [len(a.streamed.token_times_s) for a in answers if a.streamed] == [1, 2, 5000]


def test_the_ceiling_has_no_failed_requests() -> None:
    """The stub's process does not come up, or its answers are not whole."""
    result = run_bench(seconds=0.1, num_streams=4)
    for load in ("requests", "tokens"):
        assert result[load]["failed"] == 0
        assert result[load]["tokens_per_s"] > 0
