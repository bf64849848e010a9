"""What two ingresses and their replicas count together: tokens, ends, rates; and what is left of a
load. On a real Serve, over replicas without a model.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from conftest import Service, command, free_port, started, wait_until
from prometheus_client.parser import text_string_to_metric_families
from stub_load import LIMIT_S
from stub_tools import CHAT, is_idle, stub_config, stub_modules

from loadtest.bench_soak import run_soak

pytestmark = pytest.mark.serve

REQUESTS_PER_S = 200
BURST = 400
NUM_ANSWERS = 8
"""Of one HTTP request: each counts, so that few requests reach the rate."""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("counts")
    port = free_port()
    config = stub_config(folder, port)
    data = yaml.safe_load(config.read_text())
    args = data["applications"][0]["args"]
    args["pools"] = {"chat": {"priorities": [CHAT], "num_replicas": 2}, "batch": {}}
    args["admission"] = {"requests_per_s": REQUESTS_PER_S, "burst": BURST}
    config.write_text(yaml.safe_dump(data))
    with stub_modules(), started([command("serve"), "run", str(config)], port, folder) as service:
        wait_until(lambda: is_idle(service), 60, "three replicas are up")
        yield service


def totals(service: Service) -> Counter[str]:
    """The sums of all samples of a page by name, with the ingresses' own from both of them."""
    pages: dict[str, dict[str, float]] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(pages) < 2:
        assert time.monotonic() < deadline_s, "the pages of both ingresses"
        text = httpx.get(f"{service.url}/metrics", timeout=LIMIT_S).text
        own: Counter[str] = Counter()
        replicas: Counter[str] = Counter()
        origin = ""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.labels.get("ingress_replica")
                origin = name or origin
                (own if name else replicas)[sample.name] += sample.value
        pages[origin] = own
        last = replicas
    return sum((Counter(own) for own in pages.values()), last)


async def send(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    asked = {"prompt": [3] * 12, "max_tokens": 6, "ignore_eos": True, "priority": CHAT} | body
    return await client.post("/v1/completions", json=asked)


async def send_all(service: Service, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
        return await asyncio.gather(*(send(client, **body) for body in bodies))


def test_every_request_is_counted_once_by_everybody(stub: Service) -> None:
    """B71: fewer or more first tokens, ends or tokens are counted than requests were answered;
    engine and ingress disagree.
    """
    before = totals(stub)
    bodies = [
        {"prompt": [1 + number] * (5 + number), "stream": number % 2 == 0, "max_tokens": 1 + number}
        for number in range(30)
    ]
    answers = asyncio.run(send_all(stub, bodies))
    refused = asyncio.run(send_all(stub, [{"temperature": 9}] * 4))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.status_code for answer in refused} == {400}
    wait_until(lambda: is_idle(stub), 10, "all have ended")
    counted = totals(stub)
    counted.subtract(before)
    num_tokens = sum(1 + number for number in range(30))
    assert {
        name: counted[f"chunkserve_{name}"]
        for name in (
            "time_to_first_token_seconds_count",
            "e2e_request_latency_seconds_count",
            "ingress_requests_ended_total",
            "ingress_generation_tokens_total",
            "ingress_requests_rejected_total",
            "engine_time_to_first_token_seconds_count",
            "request_success_total",
            "generation_tokens_total",
            "inter_token_latency_seconds_count",
        )
    } == {
        "time_to_first_token_seconds_count": 30,
        "e2e_request_latency_seconds_count": 30,
        "ingress_requests_ended_total": 30,
        "ingress_generation_tokens_total": num_tokens,
        "ingress_requests_rejected_total": 4,
        "engine_time_to_first_token_seconds_count": 30,
        "request_success_total": 30,
        "generation_tokens_total": num_tokens,
        "inter_token_latency_seconds_count": num_tokens - 30,
    }


def test_two_ingresses_keep_one_rate(stub: Service) -> None:
    """B61: each ingress replica lets the whole rate through; or a shared one is never reached
    because leases lie about unused.
    """
    began_s = time.monotonic()
    bodies = [{"n": NUM_ANSWERS, "max_tokens": 1, "prompt": [5] * 4}] * 240
    answers = asyncio.run(send_all(stub, bodies))
    passed_s = time.monotonic() - began_s
    statuses = Counter(answer.status_code for answer in answers)
    print(statuses, f"{passed_s:.1f} s")
    assert set(statuses) == {200, 429}
    num_admitted = statuses[200] * NUM_ANSWERS
    # Permits of a burst, and of the time that the requests took to come.
    assert num_admitted <= BURST + REQUESTS_PER_S * passed_s
    assert num_admitted >= BURST / 2
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    wait_until(lambda: is_idle(stub), 10, "nothing is left of them")


def test_streams_whose_clients_leave_cost_nothing_in_the_end() -> None:
    """B43, B59: a stream that a client left goes on, its blocks or tasks stay, or the streams
    beside it lose or double a token. (`chunkserve bench soak` does the same for longer.)
    """
    result = run_soak(seconds=12.0, num_streams=60)
    print({name: value for name, value in result.items() if name != "samples"})
    assert result["num_finished"] > 100 and result["num_left"] > 20
    assert result["is_clean"]
