"""How Serve's callbacks become the beliefs of a router; no Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from deployments.protocol import GenerateRequest, SamplingParams
from deployments.request_router import PrefixRouter

POOL = DeploymentID("engine-chat", "chunkserve")


def replica(name: str, **stats: int) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, POOL), routing_stats=stats)


class Router:
    """A router of two replicas, and how Serve calls it."""

    def __init__(self) -> None:
        self.router = PrefixRouter(POOL, DeploymentHandleSource.REPLICA)
        self.router.initialize_state(balance_factor=1.25, slack_tokens=0, block_size=4)
        self.replicas = [replica("a"), replica("b")]
        self.tell()

    def tell(self) -> None:
        # Serve probes the new ones in the background, which needs actors.
        self.router._replica_id_set = {r.replica_id for r in self.replicas}
        self.router.update_replicas(self.replicas)

    async def choose(self, pending: PendingRequest) -> list[list[str]]:
        ranks = await self.router.choose_replicas(self.replicas, pending)
        return [[one.replica_id.unique_id for one in rank] for rank in ranks]

    def outstanding(self) -> dict[str, int]:
        chooser = self.router._chooser
        return {name: chooser.num_outstanding(name) for name in ("a", "b")}


def call(key: str, *args: Any) -> PendingRequest:
    return PendingRequest(list(args), {}, RequestMetadata(key, key))


def prompt(request_id: str = "r", num_tokens: int = 99) -> GenerateRequest:
    return GenerateRequest(request_id, tuple(range(num_tokens)), SamplingParams(max_tokens=1))


def test_a_request_counts_from_its_choice_to_its_end() -> None:
    """Of a burst every request goes to the same replica, or load is never taken off again."""

    async def scenario() -> None:
        router = Router()
        first, second = call("1", prompt("x")), call("2", prompt("y"))
        (best, _), (best_then, _) = await router.choose(first), await router.choose(second)
        assert {best[0], best_then[0]} == {"a", "b"}
        assert router.outstanding() == {"a": 100, "b": 100}
        accepted_by = ReplicaID(best_then[0], POOL)
        router.router.on_request_routed(first, accepted_by, None)  # its best was full
        assert router.outstanding()[best_then[0]] == 200
        router.router.on_request_completed(accepted_by, "1")
        router.router.on_request_completed(accepted_by, "2")
        assert router.outstanding() == {"a": 0, "b": 0}

    asyncio.run(scenario())


def test_a_request_that_was_never_sent_does_not_count_for_ever() -> None:
    """A client left while its request was being routed: Serve says nothing, and the replica looks
    busy for ever (like B70)."""

    async def scenario() -> None:
        router = Router()
        left = call("1", prompt("x"))
        await router.choose(left)
        left.future.cancel()
        await router.choose(call("2", prompt("y", num_tokens=9)))
        assert sum(router.outstanding().values()) == 10

    asyncio.run(scenario())


def test_what_is_no_generation_is_not_counted() -> None:
    """Asking for the model card is taken for load, or fails for want of hashes."""

    async def scenario() -> None:
        router = Router()
        ((one, other),) = await router.choose(call("1"))
        assert {one, other} == {"a", "b"}
        assert router.outstanding() == {"a": 0, "b": 0}

    asyncio.run(scenario())


def test_serve_backs_off_while_all_are_full() -> None:
    """Without this Serve asks again at once, and one full pool takes a whole core."""

    async def scenario() -> None:
        pending = call("1", prompt())
        await Router().choose(pending)
        assert pending.routing_context.should_backoff

    asyncio.run(scenario())


def test_reports_and_deaths_reach_the_chooser() -> None:
    """Load that others sent is not seen, or requests go to a dead replica."""

    async def scenario() -> None:
        router = Router()
        router.replicas = [replica("a", outstanding_tokens=500, num_blocks=10), replica("b")]
        router.tell()
        assert router.outstanding() == {"a": 500, "b": 0}
        assert (await router.choose(call("1", prompt())))[0] == ["b"]
        router.router.on_replica_actor_died(ReplicaID("b", POOL))
        assert await router.choose(call("2", prompt())) == [["a"]]

    asyncio.run(scenario())
