"""The lessor of rate limits: one token bucket a limit, lent out in batches to all who draw on it.

Pure but for the clock it is given; `rate_actor` puts it into a process that all can reach. It keeps
no record of single calls: each request for a lease says what its lessee holds and has used, and
what else was lent to it has come back, whether it expired, was given back or was lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.rate_limit import LEASE_S, Lease, LeaseRequest
from serve_app.token_bucket import EPSILON, BucketSpec, TokenBucket

FORGET_S = 600.0
"""A lessee that has not asked for so long is forgotten, with what was lent to it."""


class RateLedger:
    """Lends permits. From its start on, what is lent less what came back is at most
    `rate_per_s * t + burst`. A limit whose rate or burst has changed is another limit.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[BucketSpec, _Account] = {}

    def lease(self, request: LeaseRequest) -> Lease:
        """As many permits as wanted; where there are fewer than all lessees together want, a part
        of them in proportion, yet no less than needed; where there are fewer than needed, none.
        """
        now_s = self._clock()
        account = self._accounts.get(request.spec)
        if account is None:
            account = self._accounts[request.spec] = _Account(request.spec, now_s)
            if request.is_renewal:
                # Its permits were lent by a lessor that is no more: a full bucket would lend a
                # second burst.
                account.bucket.take_up_to(request.spec.burst, now_s)
        return account.lease(request, now_s)


@dataclass
class _Lessee:
    lent: float
    """Permits that it holds or has used, as far as is known."""
    wanted: float
    asked_at_s: float


class _Account:
    """One limit: its bucket, and who draws on it."""

    def __init__(self, spec: BucketSpec, now_s: float) -> None:
        self.spec = spec
        self.bucket = TokenBucket(spec.rate_per_s, spec.burst, now_s)
        self._lessees: dict[str, _Lessee] = {}

    def lease(self, request: LeaseRequest, now_s: float) -> Lease:
        lessee = self._settle(request, now_s)
        level = self.bucket.level(now_s)
        wait_s = self.bucket.take(request.needed, now_s)
        if wait_s > 0.0:
            return Lease(0.0, wait_s)
        part = min(1.0, level / self._num_wanted(now_s))
        more = max(0.0, request.wanted * part - request.needed)
        permits = request.needed + self.bucket.take_up_to(more, now_s)
        lessee.lent += permits
        is_all = permits >= request.wanted - EPSILON
        return Lease(permits, 0.0 if is_all else request.needed / self.spec.rate_per_s)

    def _num_wanted(self, now_s: float) -> float:
        """What all who asked lately want together."""
        recent = (one for one in self._lessees.values() if now_s - one.asked_at_s <= LEASE_S)
        return sum(lessee.wanted for lessee in recent)

    def _settle(self, request: LeaseRequest, now_s: float) -> _Lessee:
        """Take back what was lent and is neither held nor used; take away what was used and never
        lent.
        """
        known = request.held + request.used
        before = self._lessees.pop(request.lessee, None)
        if before is not None:
            lent = before.lent
        else:
            lent = known if request.is_renewal else 0.0
        if lent >= known:
            self.bucket.give_back(lent - known, now_s)
        else:
            self.bucket.take_up_to(known - lent, now_s)
        lessee = self._lessees[request.lessee] = _Lessee(known, request.wanted, now_s)
        self._forget_the_silent(now_s)
        return lessee

    def _forget_the_silent(self, now_s: float) -> None:
        # Who asked last stands last, so the first that is not silent ends the search.
        while now_s - (oldest := next(iter(self._lessees.items())))[1].asked_at_s > FORGET_S:
            del self._lessees[oldest[0]]
