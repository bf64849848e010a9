"""Which pool serves whom, with pools that follow a script; no Ray is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.config import parse_service_config
from deployments.protocol import (
    EngineStats,
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    ModelCard,
    SamplingParams,
    TokenChunk,
)
from serve_app.errors import BackendUnavailable
from serve_app.pools import PoolRoutes, Pools
from serve_app.ray_pool import PoolCounters

CARD = ModelCard("m", 10, 10, 4, (), {})
STATS = EngineStats(0, 0, 7, 8, 3, 20, 5, 4, 0, 0, {})
SERVICE = {
    "pools": {
        "chat": {"priorities": [0, 1], "spills_to": "batch"},
        "batch": {"priorities": [2], "spills_to": "chat"},
        "bulk": {"priorities": [3]},
    },
    "default_pool": "bulk",
}


@dataclass
class FakePool:
    """Answers with one token, or refuses."""

    name: str
    refuses: ErrorKind | None = None
    fails_after_a_token: bool = False
    sickness: str | None = None
    is_silent: bool = False
    num_asked: int = 0
    num_closed: int = 0
    counters: PoolCounters = field(default_factory=PoolCounters)

    async def model_card(self) -> ModelCard:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.sickness is not None:
            raise BackendUnavailable(self.sickness)
        return CARD

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.num_asked += 1
        try:
            if self.refuses is None:
                yield TokenChunk(self.name, [1])
            if self.refuses is not None or self.fails_after_a_token:
                error = ErrorInfo(self.refuses or ErrorKind.UNAVAILABLE, f"{self.name} is full")
                yield TokenChunk(self.name, finish_reason=FinishReason.ERROR, error=error)
            else:
                yield TokenChunk(self.name, finish_reason=FinishReason.LENGTH)
        finally:
            self.num_closed += 1

    async def check_health(self) -> None:
        if self.sickness is not None:
            raise BackendUnavailable(self.sickness)

    async def ask_all(self, method: str) -> list[Any]:
        if self.sickness is not None:
            raise BackendUnavailable(self.sickness)
        return [STATS, TimeoutError("silent")]


def make_pools(*fakes: FakePool) -> Pools:
    return Pools({fake.name: fake for fake in fakes}, PoolRoutes(parse_service_config(SERVICE)))


def served_by(pools: Pools, priority: int) -> list[TokenChunk]:
    async def scenario() -> list[TokenChunk]:
        request = GenerateRequest("a", (1,), SamplingParams(), priority=priority)
        return [chunk async for chunk in pools.generate(request)]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "priority, name", [(0, "chat"), (1, "chat"), (2, "batch"), (3, "bulk"), (99, "bulk")]
)
def test_a_class_is_served_by_its_pool(priority: int, name: str) -> None:
    """A class shares replicas with another, or one without a pool is refused."""
    fakes = [FakePool("chat"), FakePool("batch"), FakePool("bulk")]
    assert served_by(make_pools(*fakes), priority)[0].request_id == name
    assert {fake.name: fake.num_asked for fake in fakes if fake.num_asked} == {name: 1}


def test_without_pools_one_serves_all() -> None:
    """The short form of the configuration has no pool at all."""
    routes = PoolRoutes(parse_service_config({}))
    assert routes.find_route(0) == routes.find_route(7) == ["engine"]


@pytest.mark.parametrize("kind", [ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE])
def test_a_full_or_absent_pool_spills_over(kind: ErrorKind) -> None:
    """A class is refused while the pool it may spill to is idle."""
    full = FakePool("chat", refuses=kind)
    pools = make_pools(full, FakePool("batch"), FakePool("bulk"))
    assert [chunk.request_id for chunk in served_by(pools, 0)] == ["batch", "batch"]
    assert (pools.num_spilled, full.num_closed) == (1, 1)


def test_pools_that_spill_to_each_other_refuse_once_both_are_full() -> None:
    """Two full pools send a request to and fro for ever; or the refusal names a pool that its
    client's class does not know."""
    full = [FakePool(name, refuses=ErrorKind.OVERLOADED) for name in ("chat", "batch")]
    (chunk,) = served_by(make_pools(*full, FakePool("bulk")), 2)
    assert chunk.error is not None and chunk.error.message == "batch is full"
    assert [fake.num_asked for fake in full] == [1, 1]


def test_what_is_no_matter_of_load_does_not_spill() -> None:
    """A bad request, or one that had a token, is tried elsewhere and maybe answered twice."""
    wrong = FakePool("chat", refuses=ErrorKind.INVALID)
    (chunk,) = served_by(make_pools(wrong, FakePool("batch"), FakePool("bulk")), 0)
    assert chunk.error is not None and chunk.error.kind is ErrorKind.INVALID
    broken = FakePool("chat", fails_after_a_token=True)
    chunks = served_by(make_pools(broken, FakePool("batch"), FakePool("bulk")), 0)
    assert [chunk.request_id for chunk in chunks] == ["chat", "chat"]


def test_closing_closes_the_pool_that_serves() -> None:
    """A client leaves, and its request goes on."""
    fake = FakePool("chat")
    pools = make_pools(fake, FakePool("batch"), FakePool("bulk"))

    async def scenario() -> None:
        chunks = pools.generate(GenerateRequest("a", (1,), SamplingParams()))
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(scenario())
    assert fake.num_closed == 1


def test_one_failing_pool_leaves_the_others_alone() -> None:
    """A pool that cannot start takes /health, the model card or the stats of the others away."""
    well = FakePool("batch")
    pools = make_pools(FakePool("chat", sickness="no GPU"), well, FakePool("bulk", is_silent=True))
    asyncio.run(pools.check_health())
    assert asyncio.run(pools.find_faults()) == {"chat": "no GPU"}
    assert asyncio.run(asyncio.wait_for(pools.model_card(), 5)) == CARD
    assert asyncio.run(pools.stats()) == [STATS, STATS]
    assert asyncio.run(pools.ask_all("stats"))["chat"] == []


def test_health_fails_when_no_pool_is_well() -> None:
    """/health says 200 while nobody can be served."""
    pools = make_pools(*(FakePool(name, sickness=f"{name} died") for name in ("chat", "batch")))
    with pytest.raises(BackendUnavailable, match="chat died; batch died"):
        asyncio.run(pools.check_health())
    with pytest.raises(BackendUnavailable):
        asyncio.run(pools.model_card())
    with pytest.raises(BackendUnavailable):
        asyncio.run(pools.stats())
