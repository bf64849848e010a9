"""What the lessor of a rate lends to whom, call by call."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.rate_ledger import FORGET_S, RateLedger
from serve_app.rate_limit import LeaseRequest
from serve_app.token_bucket import BucketSpec, request_limit


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


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
    ask(ledger, spec, "b")
    assert len(ledger._accounts[spec]._lessees) == 1
    clock.now_s += 1
    left = 100 - 52 + 0.001 * (FORGET_S + 2)
    assert ask(ledger, spec, wanted=100, used=1, is_renewal=True) == pytest.approx(left)


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
