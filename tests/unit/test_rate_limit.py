"""How a rate is shared by several ingresses, and what holds while the lessor is away. All on a
virtual clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.rate_ledger import RateLedger
from serve_app.rate_limit import (
    DRY_S,
    LEASE_S,
    RETRY_S,
    Lease,
    LeasedLimit,
    LeaseRequest,
    LeaseUnavailable,
    LocalLimit,
)
from serve_app.token_bucket import BucketSpec, request_limit, token_limit

SLACK = 1e-6
"""Rounding, in permits."""


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@dataclass
class Lessor:
    """A ledger that can be away, and counts who asks."""

    clock: Clock
    ledger: RateLedger = field(init=False)
    requests: list[LeaseRequest] = field(default_factory=list)
    is_away: bool = False
    gate: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.ledger = RateLedger(self.clock)

    async def lease(self, request: LeaseRequest) -> Lease:
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        if self.is_away:
            raise LeaseUnavailable("away")
        return self.ledger.lease(request)


def make_limits(
    lessor: Lessor, num: int, rate_per_s: float = 100.0, burst: float = 100.0
) -> list[LeasedLimit]:
    spec = request_limit("service", rate_per_s, burst)
    return [LeasedLimit(spec, lessor, num, f"ingress-{i}", lessor.clock) for i in range(num)]


async def settle() -> None:
    """Let what runs in the background end; nothing here waits for anything but other tasks."""
    for _ in range(5):
        await asyncio.sleep(0)


async def offer(limits: list[LeasedLimit], per_s: list[int], seconds: int) -> list[int]:
    """Ask every limit so often, evenly; returns how many each let through."""
    clock, through = limits[0]._clock, [0] * len(limits)
    assert isinstance(clock, Clock)
    ticks = max(per_s)
    for tick in range(ticks * seconds):
        clock.now_s += 1 / ticks
        for index, limit in enumerate(limits):
            if tick * per_s[index] % ticks < per_s[index] and await limit.take(1) == 0.0:
                through[index] += 1
        await asyncio.sleep(0)
    return through


MOVES = st.lists(
    st.tuples(st.floats(0.0, 0.4), st.integers(0, 2), st.integers(1, 6), st.booleans()),
    max_size=60,
)
"""(seconds to wait, which ingress, permits to ask for, whether they are given back)"""


@settings(deadline=None)
@given(st.floats(0.5, 50.0), st.integers(6, 20), MOVES)
def test_several_ingresses_together_let_no_more_through_than_one_bucket(
    rate_per_s: float, burst: int, moves: list[tuple[float, int, int, bool]]
) -> None:
    """B61: each ingress replica has the whole limit for itself, or leases add up to more."""

    async def scenario() -> None:
        clock = Clock()
        limits = make_limits(Lessor(clock), 3, rate_per_s, burst)
        start_s, through = clock.now_s, 0
        for wait_s, index, amount, is_unused in moves:
            clock.now_s += wait_s
            if await limits[index].take(amount) == 0.0:
                through += amount
                if is_unused:
                    limits[index].give_back(amount)
                    through -= amount
            await settle()
            assert through <= rate_per_s * (clock.now_s - start_s) + burst + SLACK

    run(scenario())


def test_the_whole_rate_is_used_wherever_the_demand_is() -> None:
    """Permits lie with an idle ingress while a busy one refuses."""

    async def scenario() -> None:
        limits = make_limits(Lessor(Clock()), 4)
        through = await offer(limits, [200, 2, 2, 2], 10)
        # 100 at once and 100 a second for 10 s.
        assert 1050 <= sum(through) <= 1100
        assert all(16 <= num <= 20 for num in through[1:])

    run(scenario())


def test_too_much_demand_everywhere_is_shared() -> None:
    """The ingress that asks first takes everything."""

    async def scenario() -> None:
        through = await offer(make_limits(Lessor(Clock()), 2), [200, 200], 10)
        assert 1050 <= sum(through) <= 1100
        assert min(through) > 0.3 * sum(through)

    run(scenario())


@pytest.mark.parametrize("per_s", [80, 1000])
def test_leases_come_in_batches(per_s: int) -> None:
    """Each request, admitted or refused, is a call to the lessor."""

    async def scenario() -> None:
        lessor = Lessor(Clock())
        await offer(make_limits(lessor, 1), [per_s], 10)
        assert len(lessor.requests) <= 10 * (2 / LEASE_S + 1 / DRY_S)

    run(scenario())


def test_requests_that_come_together_share_one_call() -> None:
    """A hundred requests at once after a pause are a hundred calls."""

    async def scenario() -> None:
        lessor = Lessor(Clock(), gate=asyncio.Event())
        assert lessor.gate is not None
        (limit,) = make_limits(lessor, 1)
        takes = [asyncio.ensure_future(limit.take(1)) for _ in range(90)]
        await settle()
        lessor.gate.set()
        assert await asyncio.gather(*takes) == [0.0] * 90
        assert len(lessor.requests) <= 3

    run(scenario())


def test_a_client_that_leaves_while_it_waits_disturbs_nobody() -> None:
    """Cancelling one request cancels the call that others wait for, or loses its permits."""

    async def scenario() -> None:
        lessor = Lessor(Clock(), gate=asyncio.Event())
        assert lessor.gate is not None
        (limit,) = make_limits(lessor, 1, burst=2.0)
        gone, stays = (asyncio.ensure_future(limit.take(1)) for _ in range(2))
        await settle()
        gone.cancel()
        lessor.gate.set()
        assert await stays == 0.0
        assert await limit.take(1) == 0.0

    run(scenario())


def test_unused_permits_go_back() -> None:
    """What an ingress leased and did not need is lost to the others."""

    async def scenario() -> None:
        clock = Clock()
        lessor = Lessor(clock)
        one, other = make_limits(lessor, 2, rate_per_s=0.001, burst=100.0)
        for _ in range(50):
            await one.take(1)
        await settle()
        clock.now_s += LEASE_S + 0.01
        assert await one.take(1) == 0.0
        held = one._permits
        through = 0
        while await other.take(1) == 0.0:
            through += 1
            await settle()
        assert 50 + 1 + held + through == pytest.approx(100, abs=0.1)

    run(scenario())


def test_an_equal_share_holds_while_the_lessor_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Without the lessor every ingress lets everything through, or nothing."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        clock = Clock()
        lessor = Lessor(clock, is_away=True)
        limits = make_limits(lessor, 4)
        assert await offer(limits, [100] * 4, 10) == pytest.approx([25 + 250] * 4, abs=2)
        # Not one of 4000 requests waited for it but the first of each ingress.
        assert len(lessor.requests) <= 4 * (10 / RETRY_S + 1)

    run(scenario())
    assert caplog.text.count("an equal share holds") == 4


def test_a_lessor_that_comes_back_is_found() -> None:
    """An ingress that lost the lessor once keeps to its share for ever."""

    async def scenario() -> None:
        clock = Clock()
        lessor = Lessor(clock, is_away=True)
        limits = make_limits(lessor, 4)
        await offer(limits, [100, 1, 1, 1], 5)
        lessor.is_away = False
        lessor.restart()
        through = await offer(limits, [100, 1, 1, 1], 10)
        assert through[0] > 900

    run(scenario())


def test_losing_the_lessor_grants_no_second_burst() -> None:
    """Each time the lessor goes or a new one comes, a whole burst goes through once more."""

    async def scenario() -> None:
        clock = Clock()
        lessor = Lessor(clock)
        limits = make_limits(lessor, 2, rate_per_s=10.0, burst=1000.0)
        start_s, through = clock.now_s, sum(await offer(limits, [1000, 1000], 1))
        assert through == pytest.approx(1010, abs=2)
        for is_away in (True, False, True, False):
            lessor.is_away = is_away
            lessor.restart()
            through += sum(await offer(limits, [100, 100], 3))
            assert through <= 10.0 * (clock.now_s - start_s) + 1000 + 25

    run(scenario())


def test_large_amounts_get_through_where_the_limit_allows_them() -> None:
    """A request of many tokens is never admitted: leases are smaller, and so are shares."""
    spec: BucketSpec = token_limit("key", 6000)

    async def scenario(is_away: bool) -> tuple[bool, float, float]:
        clock = Clock()
        limit = LeasedLimit(spec, Lessor(clock, is_away=is_away), 4, "a", clock)
        for _ in range(3):
            await limit.take(100)
        clock.now_s += 120.0
        is_through = await limit.take(6000) == 0.0
        wait_s = await limit.take(100)
        clock.now_s += 30.0
        return is_through, wait_s, await limit.take(100)

    for is_away, later_s in ((False, 0.0), (True, 154.0)):
        is_through, wait_s, second_wait_s = run(scenario(is_away))
        assert is_through and wait_s > 0.0
        # A quarter of 100 tokens a second pays back 4500 that were not in the share, then 100.
        assert second_wait_s == pytest.approx(later_s)


def test_a_small_request_may_pass_where_a_large_one_must_wait() -> None:
    """One request that needs much stops all others of its limit."""

    async def scenario() -> None:
        clock = Clock()
        (limit,) = make_limits(Lessor(clock), 1, rate_per_s=1.0, burst=10.0)
        assert await limit.take(5) == 0.0
        assert await limit.take(8) > 0.0
        assert await limit.take(2) == 0.0

    run(scenario())


def test_a_limit_of_one_ingress_needs_no_lessor() -> None:
    """A single ingress pays for a process it does not need."""

    async def scenario() -> None:
        clock = Clock()
        limit = LocalLimit(request_limit("service", 1.0, 2.0), clock)
        assert [await limit.take(1) for _ in range(3)] == [0.0, 0.0, 1.0]
        limit.give_back(1)
        assert await limit.take(1) == 0.0

    run(scenario())


def test_what_a_share_let_through_is_told_to_the_lessor() -> None:
    """After each outage the limit starts full for those who used their shares."""

    async def scenario() -> None:
        lessor = Lessor(Clock(), is_away=True)
        limit, _ = make_limits(lessor, 2, rate_per_s=0.001, burst=100.0)
        assert [await limit.take(1) for _ in range(60)].count(0.0) == 50
        lessor.is_away = False
        lessor.clock.now_s += RETRY_S
        num_through = 50
        for _ in range(100):
            num_through += await limit.take(1) == 0.0
            await settle()
            lessor.clock.now_s += DRY_S
        assert num_through == 100

    run(scenario())


def test_what_was_given_back_can_be_taken_again() -> None:
    """A reservation that was not used is lost to the limit."""

    async def scenario() -> None:
        lessor = Lessor(Clock())
        (limit,) = make_limits(lessor, 1, rate_per_s=0.001, burst=10.0)
        assert await limit.take(10) == 0.0
        assert await limit.take(4) > 0.0
        limit.give_back(5)
        lessor.clock.now_s += DRY_S
        assert await limit.take(4) == 0.0
        lessor.clock.now_s += DRY_S
        assert await limit.take(4) > 0.0

    run(scenario())
