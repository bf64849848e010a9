"""Behind HAProxy with Ray's fast settings, as `chunkserve serve` starts it, over replicas without a
model; one of three pools cannot start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from conftest import Service, command, free_port, started, wait_until
from stub_tools import BATCH, BROKEN, CHAT, is_idle, replica_stats, stub_config, stub_modules

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("haproxy")
    port = free_port()
    config = stub_config(folder, port)
    serve = [command("chunkserve"), "serve", str(config), "--port", str(port)]
    with stub_modules(), started(serve, port, folder) as service:
        wait_until(lambda: "ready:" in service.log.read_text(), 60, "what works is ready")
        wait_until(lambda: is_idle(service), 60, "both pools are up")
        yield service


def num_aborted(service: Service) -> int:
    return sum(replica["num_finished"].get("abort", 0) for replica in replica_stats(service))


def long_request(stream: bool, priority: int) -> dict[str, object]:
    return {
        "prompt": [7] * 20,
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": stream,
        "priority": priority,
    }


def test_whoever_leaves_before_an_unstreamed_answer_is_noticed(stub: Service) -> None:
    """HAProxy that splices requests misses one in ten clients that leave while they wait: their
    requests run to max_tokens for nobody."""
    before = num_aborted(stub)
    for _ in range(20):
        with pytest.raises(httpx.ReadTimeout):
            body = long_request(False, BATCH)
            httpx.post(f"{stub.url}/v1/completions", json=body, timeout=0.3)
    # 1900 tokens take 38 s.
    wait_until(lambda: is_idle(stub), 15, "nothing runs for clients that have left")
    assert num_aborted(stub) - before == 20


def test_a_storm_of_disconnects_leaves_nothing_running(stub: Service) -> None:
    """Mass cancellation crashes the replica, or leaves some requests running to their end (B59);
    one that waits behind others is run in full for nobody (B58)."""
    before = num_aborted(stub)

    async def leave_early(client: httpx.AsyncClient, number: int) -> bool:
        request = long_request(number % 2 == 0, CHAT)
        try:
            async with client.stream("POST", "/v1/completions", json=request) as answer:
                async for _ in answer.aiter_bytes():
                    await asyncio.sleep(0.05 + (number % 10) * 0.02)
                    return True
        except httpx.ReadTimeout:
            return True
        return False

    async def storm() -> list[bool]:
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(30, read=3)
        async with httpx.AsyncClient(base_url=stub.url, timeout=timeout, limits=limits) as client:
            return await asyncio.gather(*(leave_early(client, number) for number in range(100)))

    for _ in range(3):
        assert all(asyncio.run(storm()))
    wait_until(lambda: is_idle(stub), 15, "nothing runs for clients that have left")
    assert num_aborted(stub) - before == 300


def test_a_pool_that_cannot_start_keeps_the_service_from_nothing_else(stub: Service) -> None:
    """The launcher gives up because one of several pools failed, or does not say which."""
    log = stub.log.read_text()
    assert "warning: engine-broken:" in log and "this pool has no device" in log
    statuses = {
        priority: httpx.post(
            f"{stub.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 2, "priority": priority},
            timeout=30,
        ).status_code
        for priority in (CHAT, BATCH, BROKEN)
    }
    assert statuses == {CHAT: 200, BATCH: 200, BROKEN: 503}
