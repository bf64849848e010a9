"""Questions to all replicas, of which one is stuck; no Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.config import ServiceConfig
from deployments.protocol import ReplicaMetrics
from serve_app.broadcast import ask_each
from serve_app.metrics import PoolMetrics
from serve_app.ray_pool import RayPool

PAGE = ReplicaMetrics("engine", "r1", b"")


class FakeReplica:
    """Answers, raises, or (told so by None) never answers."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class FakeHandle:
    """Its broadcasts reach replicas with these answers, or fail."""

    def __init__(self, *answers: Any, error: Exception | None = None) -> None:
        self._answers = answers
        self._error = error

    def options(self, **_options: Any) -> FakeHandle:
        return self

    def broadcast(self, _method: str) -> FakeHandle:
        return self

    async def _fetch_replica_results_async(self) -> list[FakeReplica]:
        if self._error is not None:
            raise self._error
        return [FakeReplica(answer) for answer in self._answers]


def metrics_of(handle: FakeHandle) -> PoolMetrics:
    return asyncio.run(RayPool("the service", handle, ServiceConfig()).metrics())  # type: ignore[arg-type]


def test_one_stuck_replica_does_not_take_away_the_pages_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve gives up on all answers when one is late, so that one hung replica blinds us for
    all.
    """
    monkeypatch.setattr("serve_app.ray_pool.METRICS_TIMEOUT_S", 0.05)
    pool = metrics_of(FakeHandle(PAGE, None, ActorDiedError(), PAGE))
    assert pool == PoolMetrics((PAGE, PAGE), 2)


def test_without_replicas_there_is_a_page_of_the_ingress_alone() -> None:
    """The page of the ingress itself is lost while its pool starts or has failed."""
    gone = DeploymentUnavailableError(DeploymentID("engine"))
    assert metrics_of(FakeHandle(error=gone)) == PoolMetrics((), 0)
    assert metrics_of(FakeHandle(error=TimeoutError())) == PoolMetrics((), 1)


@serve.deployment
class Echo:
    """A replica of Serve's own kind."""

    async def metrics(self) -> str:
        return "here"

    async def hang(self) -> None:
        await asyncio.Event().wait()


def test_serves_own_replicas_are_asked_one_by_one() -> None:
    """A newer Serve names what we call of it otherwise."""
    handle = serve.run(Echo.bind(), name="echo", _local_testing_mode=True)

    async def ask() -> tuple[list[Any], list[Any]]:
        return await ask_each(handle, "metrics", 5.0), await ask_each(handle, "hang", 0.05)

    answers, late = asyncio.run(ask())
    assert answers == ["here"]
    assert [isinstance(error, Exception) for error in late] == [True]
