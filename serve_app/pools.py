"""The pools behind an ingress as one backend: which pool a request goes to, and where next.

Owns the spill-over between pools. Which pools a class may use is `pool_routes`' rule, what Ray's
failures mean inside one is `ray_pool`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from deployments.config import ServiceConfig
from deployments.protocol import (
    EngineStats,
    ErrorKind,
    GenerateRequest,
    ModelCard,
    TokenChunk,
)
from serve_app.errors import BackendUnavailable
from serve_app.metrics import PoolMetrics
from serve_app.pool_routes import PoolRoutes
from serve_app.ray_pool import PoolCounters, RayPool

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """One pool: as `backend.Backend`, and able to pass a question to each of its replicas."""

    counters: PoolCounters

    async def model_card(self) -> ModelCard:
        """See Backend."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend."""
        ...

    async def metrics(self) -> PoolMetrics:
        """See MetricsSource."""
        ...

    async def check_health(self) -> None:
        """See Backend."""
        ...

    async def ask_all(self, method: str) -> list[Any]:
        """Each replica's answer or exception.

        Raises:
            BackendUnavailable: there is none.
        """
        ...


def _may_spill(chunk: TokenChunk) -> bool:
    kinds = (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE)
    return chunk.error is not None and chunk.error.kind in kinds


class Pools:
    """All pools as one. See `backend.Backend`.

    Args:
        pools: by name.
        routes: which class may use which.
    """

    def __init__(self, pools: Mapping[str, Pool], routes: PoolRoutes) -> None:
        self._pools = pools
        self._routes = routes
        self.num_spilled = 0
        """Requests that another pool than their own was asked to serve."""

    @classmethod
    def over_handles(cls, handles: Mapping[str, Any], config: ServiceConfig) -> Pools:
        """The pools behind Serve's handles, by the names that `build_engines` gave them."""
        if not config.pools:
            ((name, handle),) = handles.items()
            return cls({name: RayPool("the service", handle, config)}, PoolRoutes(config))
        pools = {
            name: RayPool(f"pool '{name}'", handle, config.for_pool(name))
            for name, handle in handles.items()
        }
        return cls(pools, PoolRoutes(config))

    async def model_card(self) -> ModelCard:
        """Of whichever pool says it first: all serve one model.

        Raises:
            BackendUnavailable: no pool can say.
        """
        asking = [asyncio.ensure_future(pool.model_card()) for pool in self._pools.values()]
        faults: list[BackendUnavailable] = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    return await answer
                except BackendUnavailable as fault:
                    faults.append(fault)
        finally:
            for task in asking:
                task.cancel()
        raise faults[0]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend. If no pool of the class serves it, the answer is its own pool's refusal."""
        refusal: TokenChunk | None = None
        for name in self._routes.find_route(request.priority):
            if refusal is not None:
                self.num_spilled += 1
            async with aclosing(self._pools[name].generate(request)) as chunks:
                has_begun = False
                async for chunk in chunks:
                    if not has_begun and _may_spill(chunk):
                        refusal = refusal or chunk
                        break
                    has_begun = True
                    yield chunk
                else:
                    return
        if refusal is not None:
            yield refusal

    async def stats(self) -> list[EngineStats]:
        """Of every replica of every pool that answers.

        Raises:
            BackendUnavailable: none does.
        """
        by_pool = await self.ask_all("stats")
        answers = [answer for answers in by_pool.values() for answer in answers]
        known = [answer for answer in answers if isinstance(answer, EngineStats)]
        if not known:
            raise BackendUnavailable("no replica could report")
        return known

    async def metrics(self) -> PoolMetrics:
        """See MetricsSource: the pages of all pools."""
        found = await asyncio.gather(*(pool.metrics() for pool in self._pools.values()))
        pages = tuple(page for metrics in found for page in metrics.pages)
        return PoolMetrics(pages, sum(metrics.num_missing for metrics in found))

    async def ask_all(self, method: str) -> dict[str, list[Any]]:
        """By pool, what each replica answers to a call without arguments, or the exception instead;
        nothing for a pool without replicas.
        """

        async def ask(pool: Pool) -> list[Any]:
            try:
                return await pool.ask_all(method)
            except BackendUnavailable:
                return []

        answers = await asyncio.gather(*(ask(pool) for pool in self._pools.values()))
        return dict(zip(self._pools, answers, strict=True))

    async def find_faults(self) -> dict[str, str]:
        """The pools that cannot serve now, with the reason."""

        async def find(pool: Pool) -> str | None:
            try:
                await pool.check_health()
            except BackendUnavailable as fault:
                return str(fault)
            return None

        faults = await asyncio.gather(*(find(pool) for pool in self._pools.values()))
        pairs: Iterable[tuple[str, str | None]] = zip(self._pools, faults, strict=True)
        return {name: fault for name, fault in pairs if fault is not None}

    async def check_health(self) -> None:
        """See Backend: healthy while one pool is, for its classes are served."""
        faults = await self.find_faults()
        if len(faults) == len(self._pools):
            raise BackendUnavailable("; ".join(faults.values()))

    def counters(self) -> dict[str, PoolCounters]:
        """What happened to requests on their way, by pool."""
        return {name: pool.counters for name, pool in self._pools.items()}
