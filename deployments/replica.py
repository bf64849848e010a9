"""A replica of the pool: a loaded model behind an engine thread, as Serve calls it. Thin on
purpose.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from deployments.config import ServiceConfig
from deployments.protocol import EngineStats, GenerateRequest, ModelCard, TokenChunk


class EngineReplica:
    """Loads the model, starts its engine, and passes requests to it.

    Args:
        config: the service's configuration; loading blocks until the model can serve.

    Raises:
        Whatever loading raises: Serve reports it as the reason of a failed deployment.
    """

    def __init__(self, config: ServiceConfig) -> None:
        # Here, so that the ingress and the command line, which import this class to deploy it, need
        # no torch.
        from deployments.engine.clock import WallClock
        from deployments.engine.engine import Engine
        from deployments.engine.engine_thread import EngineThread
        from deployments.execution.grammar import PreparedGrammars
        from deployments.execution.model_executor import ModelExecutor

        executor = ModelExecutor.load(config)
        clock = WallClock()
        engine = Engine.build(config.scheduler, config.cache, executor, clock)
        self._grammars = PreparedGrammars(executor.grammars)
        self._card = executor.model_card()
        self._thread = EngineThread(engine, clock, stuck_after_s=config.pool.stuck_after_s)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Continue a prompt; a refusal is a chunk with an error. Closing or cancelling this aborts
        the request.
        """
        async with self._grammars.prepared(request) as refusal:
            if refusal is not None:
                yield refusal
                return
            chunks = self._thread.generate(request)
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                await chunks.aclose()

    async def model_card(self) -> ModelCard:
        """What this replica serves."""
        return self._card

    async def stats(self) -> EngineStats:
        """The state of the engine now."""
        return self._thread.stats()

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
