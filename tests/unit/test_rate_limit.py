"""Rate limits: what a bucket lets through, how it is lent to several ingresses, and what holds
while the lessor is away. All on a virtual clock.
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

from serve_app.errors import ApiError
from serve_app.rate_ledger import FORGET_S, RateLedger
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
from serve_app.token_bucket import BucketSpec, RateLimited, TokenBucket, request_limit, token_limit

SLACK = 1e-6
"""Rounding, in permits."""

STEPS = st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 6)), max_size=80)
"""(seconds to wait, permits to ask for)"""


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@given(st.floats(0.1, 50.0), st.integers(1, 20), STEPS)
def test_a_bucket_never_lets_more_through_than_rate_times_time_and_burst(
    rate_per_s: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    """B61: within some stretch of time more requests run than the limit allows."""
    now_s, bucket = 0.0, TokenBucket(rate_per_s, burst, 0.0)
    taken: list[tuple[float, int]] = []
    for wait_s, amount in steps:
        now_s += wait_s
        if bucket.take(amount, now_s) == 0.0:
            taken.append((now_s, amount))
    for start, (since_s, _) in enumerate(taken):
        total = 0
        for until_s, amount in taken[start:]:
            total += amount
            assert total <= rate_per_s * (until_s - since_s) + burst + SLACK


@given(st.floats(0.1, 50.0), st.integers(6, 20), STEPS)
def test_who_waits_as_long_as_it_was_told_gets_its_permits(
    rate_per_s: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    """Retry-After is shorter than the wait really is, so clients come in vain; or longer."""
    now_s, bucket = 0.0, TokenBucket(rate_per_s, burst, 0.0)
    for wait_s, amount in steps:
        now_s += wait_s
        told_s = bucket.take(amount, now_s)
        if told_s > 0.0:
            assert bucket.take(amount, now_s + told_s * 0.99 - 1e-6) > 0.0
            now_s += told_s
            assert bucket.take(amount, now_s) == 0.0


def test_a_bucket_fills_up_to_its_burst_and_no_further() -> None:
    """A quiet night saves up a whole night's requests; or what is given back piles up."""
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.level(1e6) == 5.0
    bucket.give_back(3.0, 1e6)
    assert bucket.level(1e6) == 5.0


def test_a_clock_that_steps_back_grants_nothing_and_takes_nothing() -> None:
    """Time that is seen twice fills the bucket twice."""
    bucket = TokenBucket(1.0, 2.0, 10.0)
    assert bucket.take(2.0, 10.0) == 0.0
    assert bucket.level(5.0) == 0.0
    assert bucket.level(10.0) == 0.0
    assert bucket.level(11.0) == 1.0


def test_retry_after_is_a_whole_number_of_at_least_one() -> None:
    """B61: a refusal without Retry-After, or with a fraction or 0 in it: clients hammer."""
    spec = request_limit("service", 1000.0, 1000.0)
    waits = {0.0003: "1", 1.0: "1", 1.2: "2", 61.5: "62"}
    for wait_s, expected in waits.items():
        answer = RateLimited(spec, wait_s).response()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, expected)
    error = RateLimited(spec, 1.0).body()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")


def test_what_no_wait_can_help_is_the_clients_to_change() -> None:
    """A request larger than the limit ever allows is told to come again, for ever."""
    spec = token_limit("service", 600)
    spec.refuse_impossible(600)
    with pytest.raises(ApiError, match="600 tokens a minute") as refused:
        spec.refuse_impossible(601)
    assert refused.value.status == 400


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


def ask(ledger: RateLedger, spec: BucketSpec, lessee: str = "a", **asked: Any) -> float:
    """The permits that are lent."""
    fields = {"wanted": 1, "needed": 1, "held": 0, "used": 0, "is_renewal": False, **asked}
    return ledger.lease(LeaseRequest(spec, lessee, **fields)).permits


def test_what_was_used_without_a_lease_is_accounted_for() -> None:
    """The lessor was away for some and lends them a full burst afterwards all the same."""
    spec = request_limit("service", 1.0, 100.0)
    assert ask(RateLedger(Clock()), spec, wanted=100, used=60) == pytest.approx(40)


def test_a_lost_answer_takes_no_permits_along_and_a_lost_report_is_not_counted_twice() -> None:
    """Calls that time out and are heard all the same each cost what they asked for, or are
    charged for the same use again.
    """
    ledger = RateLedger(Clock())
    spec = request_limit("service", 0.001, 100.0)
    for _ in range(5):
        # 20 were used without a lease, and no answer ever arrives.
        assert ask(ledger, spec, wanted=50, used=20) == pytest.approx(50)
    assert ask(ledger, spec, wanted=100, used=20) == pytest.approx(80)
    # All 80 arrived; 30 of them were used, 40 are held, 10 expired.
    assert ask(ledger, spec, wanted=100, held=40, used=50, is_renewal=True) == pytest.approx(10)


def test_a_lessor_forgets_who_has_not_asked_for_long() -> None:
    """Each ingress that ever lived is remembered for ever; or one that comes back is lent what it
    has used.
    """
    clock = Clock()
    ledger = RateLedger(clock)
    spec = request_limit("service", 0.001, 100.0)
    for index in range(50):
        ask(ledger, spec, f"short-lived-{index}")
    ask(ledger, spec, "a")
    clock.now_s += FORGET_S + 1
    left = 100 - 51 + 0.001 * (FORGET_S + 1)
    assert ask(ledger, spec, wanted=100, used=1, is_renewal=True) == pytest.approx(left)
    assert len(ledger._accounts[spec]._lessees) == 1


def test_few_permits_are_not_split_until_nobody_can_use_them() -> None:
    """Two ingresses that want the one permit of a slow limit get a half each, and neither
    anything.
    """
    ledger = RateLedger(Clock())
    spec = request_limit("slow", 0.1, 1.0)
    assert ask(ledger, spec, "a", wanted=5) == 1.0
    refused = ledger.lease(LeaseRequest(spec, "b", 5, 1, 0.0, 0.0, False))
    assert (refused.permits, refused.wait_s) == (0.0, 10.0)


def test_a_changed_limit_starts_anew() -> None:
    """A key's new rate holds only after a restart of the lessor; or two ingresses that learn of it
    one after the other get a burst with each turn.
    """
    ledger = RateLedger(Clock())
    old, new = request_limit("key", 0.001, 10.0), request_limit("key", 0.001, 50.0)
    assert ask(ledger, old, wanted=100) == pytest.approx(10)
    assert ask(ledger, new, wanted=100) == pytest.approx(50)
    assert ask(ledger, old, "b") == ask(ledger, new, "b") == 0.0


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
