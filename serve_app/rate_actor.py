"""The lessor of rate limits as a named Ray actor, and the way to it. The only file of the rate
limits that knows Ray.

The actor belongs to the ingress replica that creates it, not to the cluster: it needs no cleaning
up when the application is deleted, as a detached one would for ever. When its owner goes, the next
ingress that asks creates it anew, and meanwhile each holds to its equal share; renewals tell the
new one not to lend a second burst.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from serve_app.rate_ledger import RateLedger
from serve_app.rate_limit import Lease, LeaseRequest, LeaseUnavailable

NAMESPACE = "serve"
"""Serve's own, in which all replicas live."""
TIMEOUT_S = 0.25
"""A request may wait for so long while the lessor does not answer."""


class RateActor:
    """The ledger in a process of its own."""

    def __init__(self) -> None:
        self._ledger = RateLedger(time.monotonic)

    def lease(self, request: LeaseRequest) -> Lease:
        """See RateLedger."""
        return self._ledger.lease(request)


class RayLeaseSource:
    """The way to the actor of one application. See LeaseSource.

    Args:
        application: its name; each has limits of its own.
    """

    def __init__(self, application: str) -> None:
        self._name = f"chunkserve-rates-{application}"
        self._connecting: asyncio.Task[Any] | None = None

    async def lease(self, request: LeaseRequest) -> Lease:
        """See LeaseSource."""
        try:
            return await asyncio.wait_for(self._ask(request), TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise LeaseUnavailable(f"no answer within {TIMEOUT_S} s") from error
        except (RayError, ValueError) as error:
            self._forget_the_dead(error)
            raise LeaseUnavailable(type(error).__name__) from error

    async def _ask(self, request: LeaseRequest) -> Lease:
        if self._connecting is None:
            # In a thread, because Ray's look-up blocks; shielded, because a first one may take
            # longer than a request should wait.
            self._connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
        actor = await asyncio.shield(self._connecting)
        lease: Lease = await actor.lease.remote(request)
        return lease

    def _connect(self) -> Any:
        options = {
            "name": self._name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
        }
        return ray.remote(RateActor).options(**options).remote()

    def _forget_the_dead(self, error: Exception) -> None:
        # The handle of one that restarts is kept: its owner's last handle keeps the actor alive.
        connecting = self._connecting
        has_failed = connecting is not None and connecting.done() and connecting.exception()
        if has_failed or isinstance(error, ActorDiedError):
            self._connecting = None
