"""Faults of a scheduler: how they are told, and how its books are compared with each other, for
tests and for an idle engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deployments.engine.block_pool import IntegrityError
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.request import Request


class SchedulerStuck(RuntimeError):
    """A fault of the scheduler: requests are there and no step can be made of them."""


def check_requests(
    known: Iterable[Request], running: Sequence[Request], waiting: Iterable[Request]
) -> None:
    """Every request is running or waiting, once; those that run stand most urgent first.

    Raises:
        IntegrityError: it is not so.
    """
    if sorted(running, key=lambda request: request.urgency_key) != running:
        raise IntegrityError("the running requests are out of order")
    found = [*running, *waiting]
    if set(found) != set(known) or len(set(found)) != len(found):
        raise IntegrityError("a request is lost, or both waiting and running")


def check_blocks(kv: KVCacheManager, running: Sequence[Request]) -> None:
    """The running requests hold the blocks that are held, and nobody else does.

    Raises:
        IntegrityError: it is not so.
    """
    kv.check_integrity(running)
    if not running and kv.num_free_blocks != kv.num_usable_blocks:
        raise IntegrityError("blocks are held while nothing runs")
