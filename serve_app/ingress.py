"""The HTTP application over a backend, and the deployment that serves it.

`make_api` is free of Ray, so the same application runs in tests, under uvicorn and as a Serve
deployment. The routes are in `routes`, what they do in `frontend`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from deployments.config import ServiceConfig
from serve_app.asgi import RequestIdMiddleware
from serve_app.backend import Backend
from serve_app.errors import install_error_handlers
from serve_app.frontend import Frontend
from serve_app.openapi import OPENAPI_URL
from serve_app.routes import add_routes
from serve_app.served_model import ServedModel

logger = logging.getLogger(__name__)


def make_api(backend: Backend, config: ServiceConfig) -> FastAPI:
    """The service's HTTP application over any backend. Works with and without its lifespan being
    run.
    """
    api = make_routes(backend, config)
    api.add_middleware(RequestIdMiddleware)
    return api


def make_routes(backend: Backend, config: ServiceConfig) -> FastAPI:
    """`make_api` for a server that echoes X-Request-Id by itself, as Serve does."""
    front = Frontend(backend, config)
    api = FastAPI(title="chunkserve", lifespan=_lifespan(front), openapi_url=OPENAPI_URL)
    install_error_handlers(api)
    add_routes(api, front)
    return api


def _lifespan(front: Frontend) -> Any:
    @asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncIterator[None]:
        # In the background: the pool may still be loading, and the first request asks again anyway.
        asking = asyncio.ensure_future(front.model())
        asking.add_done_callback(_log_failure)
        yield
        asking.cancel()

    return lifespan


def _log_failure(asking: asyncio.Future[ServedModel]) -> None:
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logger.warning(
            "the model could not be asked for at start; requests will ask again: %s", error
        )


class Ingress:
    """The ingress deployment: HTTP in front of pools of replicas. Serve asks it for its
    application.

    Args:
        engines: handles of the pools, by name.
        config: the service's configuration.
    """

    def __init__(self, engines: dict[str, Any], config: ServiceConfig) -> None:
        # Here, so that this module stays free of Ray.
        from serve_app.pools import Pools

        self._backend = Pools.over_handles(engines, config)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once in every replica."""
        return make_routes(self._backend, self._config)
