"""The HTTP application over a backend, and the deployment that serves it.

`make_api` is free of Ray, so the same application runs in tests, under uvicorn and as a Serve
deployment. The routes are in `routes`, what they do in `frontend`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Scope

from deployments.config import ServiceConfig
from serve_app.api_keys import make_keys
from serve_app.asgi import RequestIdMiddleware
from serve_app.backend import Backend
from serve_app.body_limit import BodyLimit
from serve_app.errors import ApiError, install_error_handlers
from serve_app.frontend import Frontend
from serve_app.gate import Gate, make_gate
from serve_app.key_guard import ApiKeyGuard, open_paths
from serve_app.metrics import route_template
from serve_app.openapi import OPENAPI_URL
from serve_app.routes import add_routes
from serve_app.served_model import ServedModel

logger = logging.getLogger(__name__)


def make_api(backend: Backend, config: ServiceConfig) -> FastAPI:
    """The service's HTTP application over any backend, alone in its process. Works with and without
    its lifespan being run.

    Raises:
        ConfigError: the API keys cannot be used.
    """
    api = make_routes(backend, config, make_gate(config, "local"))
    api.add_middleware(RequestIdMiddleware)
    return api


def make_routes(backend: Backend, config: ServiceConfig, gate: Gate) -> FastAPI:
    """`make_api` for a server that echoes X-Request-Id by itself, as Serve does."""

    def count(scope: Scope, error: ApiError) -> None:
        gate.metrics.rejected(route_template(scope), error.status, error.code)

    front = Frontend(backend, config, gate)
    api = FastAPI(
        title="chunkserve",
        lifespan=_lifespan(front),
        openapi_url=OPENAPI_URL,
        # A redirect would name the address that this process sees, not the one its clients know.
        redirect_slashes=False,
    )
    install_error_handlers(api, count)
    add_routes(api, front)
    # The last one added is the first one passed: strangers are sent away unread.
    api.add_middleware(BodyLimit, max_bytes=config.admission.max_body_bytes, on_refusal=count)
    api.add_middleware(
        ApiKeyGuard,
        keys=make_keys(config.admission, os.environ, time.monotonic),
        open_paths=open_paths(config.admission),
        on_refusal=count,
    )
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
        from ray import serve

        from serve_app.pools import Pools
        from serve_app.rate_actor import RayLeaseSource

        this = serve.get_replica_context()
        is_alone = config.ingress.num_replicas == 1
        leases = None if is_alone else RayLeaseSource(this.app_name)
        self._gate = make_gate(config, this.replica_id.unique_id, leases)
        self._backend = Pools.over_handles(engines, config)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once in every replica."""
        return make_routes(self._backend, self._config, self._gate)
