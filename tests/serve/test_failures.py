"""Replicas that die under load, a pool that cannot start, and where equal prompts go: the whole
service on a real Serve, over replicas without a model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Service, command, free_port, started, wait_until
from prometheus_client.parser import text_string_to_metric_families
from stub_load import LIMIT_S, NUM_CLIENTS, Tally, load_until
from stub_tools import (
    BATCH,
    BROKEN,
    CHAT,
    is_idle,
    replica_pids,
    replica_stats,
    stub_config,
    stub_modules,
)

pytestmark = pytest.mark.serve

LOAD_S = 16.0


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("stub")
    port = free_port()
    config = stub_config(folder, port)
    with stub_modules(), started([command("serve"), "run", str(config)], port, folder) as service:
        wait_until(lambda: len(replica_stats(service)) == 3, 60, "both pools are up")
        yield service


async def load_and_kill(service: Service, victims: list[str]) -> Tally:
    async def kill_loop() -> None:
        for victim in victims:
            await asyncio.sleep(LOAD_S / (len(victims) + 1))
            os.kill(replica_pids(service, victim)[0], signal.SIGKILL)

    ends_s = time.monotonic() + LOAD_S
    load = load_until(service, lambda: time.monotonic() >= ends_s)
    tally, _ = await asyncio.gather(load, kill_loop())
    return tally


def test_killed_replicas_and_ingresses_cost_only_what_they_had_begun(stub: Service) -> None:
    """kill -9 under load: a request hangs, ends as if it were whole, has tokens twice, or keeps its
    blocks for ever; or the service does not come back."""
    victims = ["engine-chat", "ingress", "engine-chat"]
    tally = asyncio.run(load_and_kill(stub, victims))
    print(tally.ends, f"longest {tally.longest_s:.1f} s")
    assert sum(tally.ends.values()) == tally.num_sent > 50
    assert tally.ends["silence"] == 0 and tally.longest_s < LIMIT_S
    # A false finish would be a text that another request with this prompt did not get.
    assert all(len(texts) == 1 for texts in tally.texts.values())
    assert all(not end.startswith("text") or end == "text, length" for end in tally.ends)
    lost = tally.num_sent - tally.ends["text, length"]
    assert lost <= len(victims) * NUM_CLIENTS
    assert tally.ends["text, length"] > tally.num_sent / 2

    wait_until(lambda: is_idle(stub), 40, "three replicas, nothing runs, every block is free")


def complete(service: Service, prompt: list[int], priority: int, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "priority": priority, "max_tokens": 4, "ignore_eos": True, **more}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=LIMIT_S)


def test_a_pool_that_cannot_start_is_refused_by_name_and_alone(stub: Service) -> None:
    """One failing pool takes the application down, or its requests hang."""
    answer = complete(stub, [5] * 8, BROKEN)
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
    assert "pool 'broken' has no running replica" in answer.json()["error"]["message"]
    assert complete(stub, [5] * 8, CHAT).status_code == 200
    assert complete(stub, [5] * 8, BATCH).status_code == 200
    assert httpx.get(f"{stub.url}/health").status_code == 200


def test_a_prompt_goes_where_its_prefix_is_cached(stub: Service) -> None:
    """Turns of one chat go to replicas at random, and each computes the whole of it again."""
    before = sum(replica["num_cached_tokens"] for replica in replica_stats(stub))
    turns = [[9] * 40 + [20 + turn % 5] * 8 * turn for turn in range(1, 11)]
    texts = [complete(stub, prompt, CHAT, seed=1).status_code for prompt in turns]
    assert texts == [200] * len(turns)
    after = sum(replica["num_cached_tokens"] for replica in replica_stats(stub))
    # Each of the two ingresses has to learn by itself where the prefix is.
    assert after - before >= 40 * (len(turns) - 2)


def gauge_values(page: str, name: str) -> dict[str, float]:
    """By replica; fails if the page is not what Prometheus reads."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert name in families, f"no {name} on the page"
    return {sample.labels["replica"]: sample.value for sample in families[name].samples}


def num_held(service: Service) -> int:
    """Requests that run or wait, in all replicas."""
    return sum(each["num_running"] + each["num_waiting"] for each in replica_stats(service))


async def leave_all(service: Service, num_streams: int) -> None:
    """Begin streams, and close all of them at once when they run."""
    body = {"prompt": [7] * 8, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:

        async def begin(number: int) -> None:
            more = {"priority": BATCH if number % 3 == 0 else CHAT, "prompt": [number + 1] * 8}
            async with client.stream("POST", "/v1/completions", json=body | more) as answer:
                async for _ in answer.aiter_lines():
                    pass

        tasks = [asyncio.create_task(begin(number)) for number in range(num_streams)]
        await asyncio.to_thread(
            wait_until,
            lambda: num_held(service) == num_streams,
            LIMIT_S,
            "all streams run or wait",
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_one_page_holds_every_replica_and_falls_to_zero(stub: Service) -> None:
    """B70, B59: /metrics shows the replica it happened to ask; or after all clients left at once
    its gauges stay where they were, and nobody sends work there again."""
    wait_until(lambda: len(replica_stats(stub)) == 3, 60, "all replicas are up")
    asyncio.run(leave_all(stub, 90))

    def is_at_rest() -> bool:
        page = httpx.get(f"{stub.url}/metrics", timeout=LIMIT_S).text
        running = gauge_values(page, "chunkserve_num_requests_running")
        waiting = gauge_values(page, "chunkserve_num_requests_waiting")
        return len(running) == len(waiting) == 3 and not any((*running.values(), *waiting.values()))

    wait_until(is_at_rest, 10, "three replicas on the page, and nothing runs or waits")
    wait_until(lambda: is_idle(stub), 5, "every block is free")
