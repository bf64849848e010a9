"""A service that is changed while it is used: fewer replicas, and a new version."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import REPOSITORY, Service, command, free_port, started, wait_until
from stub_load import LIMIT_S, Tally, load_until
from stub_tools import CHAT, replica_pids, replica_stats, stub_config, stub_modules

pytestmark = pytest.mark.serve

CHANGE_S = 120.0
NUM_STREAMS = 20
STREAM_TOKENS = 250
"""Of 20 ms each at least: a stream outlives the change."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = stub_config(tmp_path_factory.mktemp("changes"), free_port())
    data = yaml.safe_load(path.read_text())
    args = data["applications"][0]["args"]
    args["pool"]["graceful_shutdown_timeout_s"] = 60
    args["pools"] = {"chat": {"num_replicas": 2}}
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def stub(config: Path) -> Iterator[Service]:
    port = yaml.safe_load(config.read_text())["http_options"]["port"]
    run = [command("serve"), "run", str(config)]
    with stub_modules(), started(run, port, config.parent) as service:
        wait_until(lambda: len(replica_stats(service)) == 2, 60, "both replicas are up")
        yield service


def deploy(service: Service, config: Path, application: dict[str, Any]) -> None:
    """Put a changed application in place, as `serve deploy` does, and return at once."""
    data = yaml.safe_load(config.read_text())
    data["applications"][0].update(application)
    changed = config.with_name("changed.yaml")
    changed.write_text(yaml.safe_dump(data))
    # Other clusters may run beside this one, so its own address must be used.
    found = re.search(r"dashboard at.*?(http://[\d.:]+)", service.log.read_text())
    assert found, "the service does not tell where its dashboard is"
    address = found[1]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    subprocess.run(
        [command("serve"), "deploy", str(changed), "--address", address],
        env=environment,
        cwd=REPOSITORY,
        check=True,
        timeout=60,
    )


async def stream(client: httpx.AsyncClient, number: int) -> str:
    """The text of one long stream.

    Raises:
        AssertionError: it did not end as it should.
    """
    body = {
        "prompt": [1 + number] * 20,
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "priority": CHAT,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        raw = (await answer.aread()).decode()
    assert answer.status_code == 200 and '"error"' not in raw
    assert raw.count('"finish_reason":"length"') == 1 and "[DONE]" in raw
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', raw))


async def streams(service: Service) -> list[str]:
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        return await asyncio.gather(*(stream(client, number) for number in range(NUM_STREAMS)))


def test_scaling_down_ends_no_stream(stub: Service, config: Path) -> None:
    """B65: streams of the replica that goes are cut, or their tokens are lost or come twice."""
    undisturbed = asyncio.run(streams(stub))
    before = len(replica_stats(stub))

    async def scenario() -> list[str]:
        running = asyncio.ensure_future(streams(stub))
        while sum(each["num_running"] for each in await stats_of(stub)) < NUM_STREAMS:
            await asyncio.sleep(0.1)
        change = {"deployments": [{"name": "engine-chat", "num_replicas": 1}]}
        await asyncio.to_thread(deploy, stub, config, change)
        return await running

    assert before == 2
    assert asyncio.run(asyncio.wait_for(scenario(), 120)) == undisturbed
    wait_until(lambda: len(replica_stats(stub)) == 1, 60, "one replica is left")


async def stats_of(service: Service) -> list[dict[str, Any]]:
    return await asyncio.to_thread(replica_stats, service)


def all_pids(service: Service) -> set[int]:
    return {*replica_pids(service, "engine-chat"), *replica_pids(service, "ingress")}


def test_a_new_version_costs_no_request(stub: Service, config: Path) -> None:
    """B67: while replicas and ingresses are replaced by those of a new version, requests fail."""
    data = yaml.safe_load(config.read_text())["applications"][0]
    data["args"]["scheduler"]["chunk_size"] = 32
    before = all_pids(stub)
    tallies: list[Tally] = []
    is_over = threading.Event()
    loading = threading.Thread(
        target=lambda: tallies.append(asyncio.run(load_until(stub, is_over.is_set)))
    )
    loading.start()
    try:
        deploy(stub, config, data)
        wait_until(lambda: not before & all_pids(stub), CHANGE_S, "all replicas are new ones")
    finally:
        is_over.set()
        loading.join(LIMIT_S)
    (tally,) = tallies
    print(tally.ends, f"longest {tally.longest_s:.1f} s")
    assert tally.num_sent > 50
    assert set(tally.ends) == {"text, length"}
    assert all(len(texts) == 1 for texts in tally.texts.values())
