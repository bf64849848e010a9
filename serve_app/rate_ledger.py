"""The lessor of rate limits: one token bucket a limit, lent out in batches to all who draw on it.

Pure but for the clock it is given; `rate_actor` puts it into a process that all can reach.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.rate_limit import LEASE_S, Lease, LeaseRequest
from serve_app.token_bucket import BucketSpec, TokenBucket


class RateLedger:
    """Lends permits. From its start on, what is lent less what is returned is at most
    `rate_per_s * t + burst`; a limit whose rate or burst has changed starts anew.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def lease(self, request: LeaseRequest) -> Lease:
        """As many permits as wanted; where there are fewer than all lessees together want, a part
        of them in proportion, yet no less than needed; where there are fewer than needed, none.
        """
        now_s = self._clock()
        account = self._accounts.get(request.spec.name)
        if account is None or account.spec != request.spec:
            account = _Account(request.spec, now_s)
            self._accounts[request.spec.name] = account
            if request.is_renewal:
                # Its permits were lent by a lessor that is no more: a full bucket would lend a
                # second burst.
                account.bucket.take_up_to(request.spec.burst, now_s)
        return account.lease(request, now_s)


class _Account:
    """One limit: its bucket, and what each lessee wanted last."""

    def __init__(self, spec: BucketSpec, now_s: float) -> None:
        self.spec = spec
        self.bucket = TokenBucket(spec.rate_per_s, spec.burst, now_s)
        self._wants: dict[str, tuple[float, float]] = {}
        """lessee -> (wanted, until when this counts)"""

    def lease(self, request: LeaseRequest, now_s: float) -> Lease:
        self._settle(request.balance, now_s)
        self._wants[request.lessee] = (request.wanted, now_s + LEASE_S)
        self._wants = {name: want for name, want in self._wants.items() if want[1] >= now_s}
        level = self.bucket.level(now_s)
        wait_s = self.bucket.take(request.needed, now_s)
        if wait_s > 0.0:
            return Lease(0.0, wait_s)
        part = min(1.0, level / sum(wanted for wanted, _ in self._wants.values()))
        more = max(0.0, request.wanted * part - request.needed)
        return Lease(request.needed + self.bucket.take_up_to(more, now_s), 0.0)

    def _settle(self, balance: float, now_s: float) -> None:
        if balance >= 0:
            self.bucket.give_back(balance, now_s)
        else:
            self.bucket.take_up_to(-balance, now_s)
