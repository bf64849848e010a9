"""Rate limits over several processes of a real Ray: one lessor for all, found again when it is
lost.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from conftest import wait_until

from serve_app.rate_actor import NAMESPACE, RayLeaseSource
from serve_app.rate_limit import LeasedLimit, LeaseRequest, LeaseUnavailable
from serve_app.token_bucket import request_limit

pytestmark = pytest.mark.serve

BURST = 100
SPEC = request_limit("service", 0.001, BURST)
"""So slow that what got through is the burst alone, however long a test takes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # A folder of pytest has a path too long for the sockets below it.
    folder = tempfile.mkdtemp(prefix="chunkserve-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def start_ingress(application: str) -> Any:
    """An actor that draws on the limit, as an ingress replica does."""

    class FakeIngress:
        def __init__(self) -> None:
            source = RayLeaseSource(application)
            self._limit = LeasedLimit(SPEC, source, 2, uuid.uuid4().hex, time.monotonic)
            self._num_through = 0

        async def take(self, attempts: int) -> int:
            """Returns how many ever got through here."""
            for _ in range(attempts):
                self._num_through += await self._limit.take(1) == 0.0
            return self._num_through

        async def is_leasing(self) -> bool:
            await self.take(1)
            return not self._limit._is_away

    return ray.remote(FakeIngress).options(num_cpus=0).remote()


def is_leasing(ingress: Any) -> bool:
    return bool(ray.get(ingress.is_leasing.remote()))


def num_through(ingresses: list[Any]) -> int:
    """What got through at all of them, after some more attempts."""
    return sum(ray.get([ingress.take.remote(20) for ingress in ingresses]))


def is_lessor_up(application: str) -> bool:
    async def ask() -> bool:
        source = RayLeaseSource(application)
        try:
            await source.lease(LeaseRequest(SPEC, "probe", 1, 1, 0.0, 0.0, True))
        except LeaseUnavailable:
            return False
        return True

    return asyncio.run(ask())


def test_two_ingresses_draw_on_one_limit(cluster: None) -> None:
    """Each ingress replica has a lessor of its own, so the limit holds once for each."""
    ingresses = [start_ingress("one") for _ in range(2)]
    wait_until(lambda: all(map(is_leasing, ingresses)), 60, "both have found the lessor")
    wait_until(lambda: num_through(ingresses) > 0.7 * BURST, 60, "both draw on it")
    ray.get([ingress.take.remote(BURST) for ingress in ingresses])
    assert num_through(ingresses) <= BURST


def test_a_lessor_is_made_anew_when_its_owner_goes(cluster: None) -> None:
    """With the ingress replica that made the lessor, the limit of all is gone for good."""
    owner, other = start_ingress("two"), start_ingress("two")
    wait_until(lambda: is_leasing(owner), 60, "the first has made the lessor")
    wait_until(lambda: is_leasing(other), 60, "the second has found it")
    # So its own share is used up when it has to fall back on it.
    wait_until(lambda: num_through([other]) > 0.5 * BURST, 60, "the second draws on it")
    by_owner = num_through([owner])
    ray.kill(owner)
    wait_until(lambda: not is_leasing(other), 60, "the second has lost it")
    wait_until(lambda: is_leasing(other), 60, "the second has made another")
    # The new one lends no second burst.
    assert num_through([other]) + by_owner <= BURST


def test_a_lessor_that_crashes_comes_back(cluster: None) -> None:
    """A crash of the lessor's process ends the common limit until somebody restarts the
    service.
    """
    ingress = start_ingress("three")
    wait_until(lambda: is_leasing(ingress), 60, "the lessor is up")
    lessor = ray.get_actor("chunkserve-rates-three", namespace=NAMESPACE)
    ray.kill(lessor, no_restart=False)
    wait_until(lambda: is_lessor_up("three"), 60, "the lessor is up again")
    wait_until(lambda: is_leasing(ingress), 60, "the ingress leases again")
