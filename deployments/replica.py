"""A replica of the pool: a loaded model behind an engine thread, as Serve calls it. Thin on
purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from ray import serve

from deployments.config import ServiceConfig
from deployments.engine.token_relay import TokenRelays
from deployments.protocol import (
    EngineStats,
    GenerateRequest,
    ModelCard,
    OpenRelay,
    ReplicaMetrics,
    Seat,
    TokenChunk,
    TokenRun,
)
from deployments.replica_choice import ReplicaReport, count_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from deployments.engine.stats import EngineObserver
    from deployments.engine.token_stream import Usher
    from deployments.execution.model_executor import ModelExecutor


class EngineReplica:
    """Loads the model, starts its engine, and passes requests to it.

    Args:
        config: the service's configuration; loading blocks until the model can serve.

    Raises:
        Whatever loading raises: Serve reports it as the reason of a failed deployment.
    """

    def __init__(self, config: ServiceConfig) -> None:
        from deployments.engine.clock import WallClock
        from deployments.engine.engine import Engine
        from deployments.engine.engine_thread import EngineThread
        from deployments.execution.grammar import PreparedGrammars
        from deployments.execution.startup import call_apart, made_to_stay
        from deployments.metrics import EngineCollector, EngineMeters

        with made_to_stay():
            executor = call_apart(lambda: self.load(config))
            from deployments.execution.kv_cache import used_bytes_reader
        clock = WallClock()
        meters = EngineMeters(clock)
        observers = [meters, *self._step_logs(config.execution.step_log_dir)]
        engine = Engine.build(config.scheduler, config.cache, executor, clock, observers)
        self._grammars = PreparedGrammars(executor.grammars)
        self._card = executor.model_card()
        self._thread = EngineThread(engine, clock, stuck_after_s=config.pool.stuck_after_s)
        self._registry = CollectorRegistry()
        self._registry.register(
            EngineCollector(
                meters,
                self._thread.stats,
                has_prefix_cache=config.cache.enable_prefix_caching,
                find_used_bytes=used_bytes_reader(executor.device),
            )
        )
        self._num_tasks = Gauge(
            "chunkserve_asyncio_tasks",
            "Tasks on the event loop; what is left when nothing runs has leaked.",
            registry=self._registry,
        )
        self._thread.start()
        self._num_cacheable_blocks = (
            executor.limits.num_blocks - 1 if config.cache.enable_prefix_caching else 0
        )
        self._num_outstanding_tokens = 0
        self._relays = TokenRelays(config.pool.stream_interval_s)

    def _step_logs(self, folder: Path | None) -> list[EngineObserver]:
        from deployments.engine.step_log_file import StepLogFile

        return [] if folder is None else [StepLogFile(folder / f"{self._name}.jsonl")]

    @staticmethod
    def load(config: ServiceConfig) -> ModelExecutor:
        """The executor of the configured model; a subclass may bring another that has the same
        methods.
        """
        # Here, so that the ingress and the command line, which import this class to deploy it, need
        # no torch.
        from deployments.execution.model_executor import ModelExecutor

        return ModelExecutor.load(config)

    async def generate(
        self, request: GenerateRequest, seat: Seat | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Continue a prompt; a refusal is a chunk with an error. Closing or cancelling this aborts
        the request. With a seat, tokens between the first chunk and the last one leave by its
        reader's relay while that is open.
        """
        num_tokens = count_tokens(request)
        self._num_outstanding_tokens += num_tokens
        try:
            async with aclosing(self._generate(request, self._relays.usher(seat))) as chunks:
                first = await anext(chunks)
                yield first if first.finish_reason else replace(first, replica=self._name)
                async for chunk in chunks:
                    yield chunk
        finally:
            self._num_outstanding_tokens -= num_tokens

    async def _generate(
        self, request: GenerateRequest, usher: Usher
    ) -> AsyncGenerator[TokenChunk, None]:
        async with self._grammars.prepared(request) as refusal:
            if refusal is not None:
                yield refusal
                return
            async with aclosing(self._thread.generate(request, usher)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def relay(self, opening: OpenRelay) -> AsyncGenerator[list[TokenRun], None]:
        """The stream that the requests of one reader share, for as long as it reads; the first item
        is empty.
        """
        async with aclosing(self._relays.carry(opening.reader)) as items:
            async for item in items:
                yield item

    @property
    def _name(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    async def model_card(self) -> ModelCard:
        """What this replica serves."""
        return self._card

    async def stats(self) -> EngineStats:
        """The state of the engine now."""
        return self._thread.stats()

    async def metrics(self) -> ReplicaMetrics:
        """Its page for Prometheus, at this moment."""
        self._num_tasks.set(len(asyncio.all_tasks()))
        this = serve.get_replica_context().replica_id
        return ReplicaMetrics(
            deployment=this.deployment_id.name,
            replica=this.unique_id,
            text=generate_latest(self._registry),
        )

    async def record_routing_stats(self) -> dict[str, int]:
        """A ReplicaReport, as fields: Serve asks periodically and tells all who route."""
        report = ReplicaReport(self._num_outstanding_tokens, self._num_cacheable_blocks)
        return asdict(report)

    async def check_health(self) -> None:
        """Serve calls this periodically and replaces the replica when it raises.

        Raises:
            EngineDead: the engine ended or is stuck; says why.
        """
        self._thread.check_health()

    def __del__(self) -> None:
        # Serve calls this at shutdown, and Python also where __init__ failed half way.
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.stop()
