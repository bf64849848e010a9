"""What the HTTP side needs of a pool of replicas; free of Ray, so tests can stand in for one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from deployments.protocol import EngineStats, GenerateRequest, ModelCard, TokenChunk
from serve_app.metrics import PoolMetrics


class Backend(Protocol):
    """Where token ids go and come from: a pool of replicas, or a script in a test."""

    async def model_card(self) -> ModelCard:
        """What the pool serves.

        Raises:
            BackendUnavailable: no replica can say.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Continue a prompt. Never raises for a request's sake: an error is the last chunk. Closing
        it aborts.
        """
        ...

    async def stats(self) -> list[EngineStats]:
        """The state of each replica.

        Raises:
            BackendUnavailable: a replica cannot say.
        """
        ...

    async def metrics(self) -> PoolMetrics:
        """The pages of all replicas. Never raises for a replica's sake: it is missing then."""
        ...

    async def check_health(self) -> None:
        """Return if a request could be served now.

        Raises:
            BackendUnavailable: no replica can serve; says why.
        """
        ...
