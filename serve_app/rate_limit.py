"""Rate limits as an ingress sees them: permits are taken from a limit and may be given back.

A limit of one ingress alone is a token bucket (`LocalLimit`). One that several share is leased from
a lessor in batches (`LeasedLimit`): some permits for the next moment, by the demand seen lately, so
that a request costs a subtraction and not a call to another process.

    lessor (one):  token bucket ──► lease of 40 ──► ingress A: 40, 39, 38 … low: asks for more
                                └─► lease of  9 ──► ingress B: 9, 8 …   not used in time: goes back

Who may be lent what is the lessor's business (`rate_ledger`), how it is reached is that of
`rate_actor`. Nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve_app.token_bucket import EPSILON, BucketSpec, TokenBucket

logger = logging.getLogger(__name__)

LEASE_S = 0.2
"""How long leased permits last; a lease is the demand of so long."""
SHORTEST_WINDOW_S = 0.02
"""Demand is measured over at least so long, or two requests at once look like thousands."""
DRY_S = 0.1
"""After the lessor had too little, it is not asked again for so long; or for half the time that the
burst takes to fill, if that is less: permits above the burst would be lost."""
RETRY_S = 1.0
"""Between two attempts to reach a lessor that is away."""


class LeaseUnavailable(Exception):
    """The lessor cannot be reached now; the message says why."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """An ingress asks for permits.

    `wanted` is the demand of the next `LEASE_S`; less than `needed` is of no use to it. `held` are
    leased permits that it still has, `used` all that it ever used, with a lease or without. From
    these the lessor sees what came back and which of its answers were lost. `is_renewal`: it has
    had leases of this limit before, so a lessor that knows nothing of them is a new one.
    """

    spec: BucketSpec
    lessee: str
    wanted: float
    needed: float
    held: float
    used: float
    is_renewal: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """Permits for the next `LEASE_S`, which may be none. Where they are fewer than wanted, `wait_s`
    is the time until as many as needed may have come; else 0.
    """

    permits: float
    wait_s: float


class LeaseSource(Protocol):
    """The way to the lessor."""

    async def lease(self, request: LeaseRequest) -> Lease:
        """Ask for permits; answers or raises within a fraction of a second.

        Raises:
            LeaseUnavailable: the lessor is away.
        """
        ...


class Limit(Protocol):
    """A bound on a rate."""

    @property
    def spec(self) -> BucketSpec:
        """The limit itself."""
        ...

    async def take(self, amount: float) -> float:
        """Take `amount` permits and return 0, or take none and return the seconds to wait."""
        ...

    def give_back(self, amount: float) -> None:
        """Return permits that were taken and not used."""
        ...


class LocalLimit:
    """A limit that this process alone draws on. See Limit."""

    def __init__(self, spec: BucketSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self._clock = clock
        self._bucket = TokenBucket(spec.rate_per_s, spec.burst, clock())

    async def take(self, amount: float) -> float:
        """See Limit."""
        return self._bucket.take(amount, self._clock())

    def give_back(self, amount: float) -> None:
        """See Limit."""
        self._bucket.give_back(amount, self._clock())


class LeasedLimit:
    """A limit that several processes draw on. See Limit.

    While the lessor is away each falls back to an equal share of the rate and of the burst, and
    goes on asking in the background. The share is drained by leased permits too, so that losing the
    lessor grants nobody a second burst.

    Args:
        num_shares: processes that draw on the limit.
        lessee: this one's name, different from the others'.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        spec: BucketSpec,
        source: LeaseSource,
        num_shares: int,
        lessee: str,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self._source = source
        self._lessee = lessee
        self._clock = clock
        now_s = clock()
        self._share = TokenBucket(spec.rate_per_s / num_shares, spec.burst / num_shares, now_s)
        self._demand = _Demand(now_s)
        self._permits = 0.0
        self._expire_at_s = now_s
        self._used = 0.0
        self._waiting = 0.0
        self._dry = _Dry(amount=0.0, until_s=now_s, refilled_at_s=now_s)
        self._asking: asyncio.Task[None] | None = None
        self._is_renewal = False
        self._is_away = False
        self._retry_at_s = now_s

    async def take(self, amount: float) -> float:
        """See Limit. Waits for the lessor only where no permits are left."""
        self._demand.add(amount)
        self._waiting += amount
        try:
            while not self._is_away:
                now_s = self._clock()
                if self._take_leased(amount, now_s):
                    return 0.0
                if self._dry.holds_for(amount, now_s):
                    return self._dry.refilled_at_s - now_s
                # Shielded: others wait for the same answer, and permits must not get lost.
                await asyncio.shield(self._ask(amount - self._permits))
        finally:
            self._waiting -= amount
        return self._take_share(amount, self._clock())

    def give_back(self, amount: float) -> None:
        """See Limit. The lessor learns of it when it is asked for the next lease."""
        self._used -= amount
        if self._is_away:
            self._share.give_back(amount, self._clock())

    def _take_leased(self, amount: float, now_s: float) -> bool:
        if now_s > self._expire_at_s:
            self._permits = 0.0
        if amount > self._permits + EPSILON:
            return False
        self._permits = max(0.0, self._permits - amount)
        self._used += amount
        self._share.take_up_to(amount, now_s)
        if self._permits < self._demand.of_a_lease / 2 and not self._dry.holds_for(1.0, now_s):
            self._ask(1.0)
        return True

    def _take_share(self, amount: float, now_s: float) -> float:
        if now_s >= self._retry_at_s:
            self._ask(amount)
        # What the whole limit allows must get through a share, too: it then owes the rest.
        wait_s = self._share.take(min(amount, self._share.burst), now_s)
        if wait_s == 0.0:
            self._share.owe(max(0.0, amount - self._share.burst))
            self._used += amount
        return wait_s

    def _ask(self, needed: float) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._lease(needed))
        return self._asking

    async def _lease(self, needed: float) -> None:
        now_s = self._clock()
        usable = self._permits + needed
        expected = max(self._waiting, self._demand.measure(now_s))
        wanted = max(needed, expected - self._permits)
        request = LeaseRequest(
            spec=self.spec,
            lessee=self._lessee,
            wanted=wanted,
            needed=needed,
            held=self._permits,
            used=self._used,
            is_renewal=self._is_renewal,
        )
        try:
            lease = await self._source.lease(request)
        except LeaseUnavailable as error:
            self._lose_lessor(error)
            return
        self._find_lessor()
        now_s = self._clock()
        if lease.permits > 0.0:
            self._permits += lease.permits
            self._expire_at_s = now_s + LEASE_S
        if lease.wait_s > 0.0:
            pause_s = min(DRY_S, max(lease.wait_s, self.spec.burst / self.spec.rate_per_s / 2))
            self._dry = _Dry(usable, now_s + pause_s, now_s + max(lease.wait_s, pause_s))

    def _lose_lessor(self, error: LeaseUnavailable) -> None:
        self._retry_at_s = self._clock() + RETRY_S
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "limit %s: an equal share holds while the lessor is away (%s)",
                self.spec.name,
                error,
            )

    def _find_lessor(self) -> None:
        self._is_renewal = True
        if self._is_away:
            self._is_away = False
            logger.info("limit %s: the lessor is back", self.spec.name)


@dataclass(frozen=True, slots=True)
class _Dry:
    """The lessor had less than `amount`; asking again before `until_s` is of no use."""

    amount: float
    until_s: float
    refilled_at_s: float

    def holds_for(self, amount: float, now_s: float) -> bool:
        return now_s < self.until_s and amount >= self.amount


class _Demand:
    """How many permits were asked for lately."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._num_asked = 0.0
        self._per_s = 0.0

    @property
    def of_a_lease(self) -> float:
        """Permits that the time of one lease will need, by the last measurement."""
        return self._per_s * LEASE_S

    def add(self, amount: float) -> None:
        self._num_asked += amount

    def measure(self, now_s: float) -> float:
        """Close the window; returns `of_a_lease`. It follows a rise at once and a fall slowly."""
        seen_per_s = self._num_asked / max(now_s - self._since_s, SHORTEST_WINDOW_S)
        self._per_s = max(seen_per_s, (self._per_s + seen_per_s) / 2)
        self._since_s, self._num_asked = now_s, 0.0
        return self.of_a_lease
