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

    load = load_until(service, time.monotonic() + LOAD_S)
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
