"""One question to every replica of a deployment, each answer by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle


async def ask_each(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> list[Any]:
    """What each running replica answers to `method`, or the exception for one that failed or did
    not answer within `timeout_s`.

    Serve's own `results_async` has one timeout for all: a single stuck replica takes away the
    answers of the others.

    Raises:
        RayError, RayServeException, TimeoutError: the replicas are not known, so none was asked.
    """
    response = handle.broadcast(method)
    asked = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    answers = (_answer_of(replica, timeout_s) for replica in asked)
    return await asyncio.gather(*answers, return_exceptions=True)


async def _answer_of(replica: Any, timeout_s: float) -> Any:
    return await asyncio.wait_for(replica.get_async(), timeout_s)
