"""A token bucket, and what a client is told when it is empty.

Pure arithmetic over a time that is passed in (seconds of a monotonic clock); knows no event loop,
no clock and no callers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.errors import ApiError

EPSILON = 1e-9
"""Permits that rounding may have lost: who waits as long as it was told finds its permits."""


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A limit: at most `rate_per_s * t + burst` permits in any `t` seconds.

    `name` tells it from the others and is the same in every process; `unit` is what one permit is
    ("requests" or "tokens"), `text` how a client is told of the limit.
    """

    name: str
    unit: str
    text: str
    rate_per_s: float
    burst: float

    def refuse_impossible(self, amount: float) -> None:
        """Refuse what no wait can help.

        Raises:
            ApiError: 400, the amount is larger than the burst.
        """
        if amount > self.burst:
            message = (
                f"The request needs {amount:g} {self.unit}, but the limit is {self.text}, and at "
                f"most {self.burst:g} at once; ask for fewer or shorter answers (n, max_tokens), "
                "or send fewer or shorter prompts."
            )
            raise ApiError(400, message, code="request_too_large")


def request_limit(name: str, per_s: float, burst: float) -> BucketSpec:
    """A limit on requests."""
    return BucketSpec(f"{name}/requests", "requests", f"{per_s:g} requests a second", per_s, burst)


def token_limit(name: str, per_min: float) -> BucketSpec:
    """A limit on tokens; a minute's worth may come at once."""
    return BucketSpec(
        f"{name}/tokens", "tokens", f"{per_min:g} tokens a minute", per_min / 60, per_min
    )


class RateLimited(ApiError):
    """429: the same request may succeed after `retry_after_s`, a whole number of at least 1.

    Args:
        spec: the limit that is reached.
        wait_s: until its bucket holds what the request needs.
    """

    def __init__(self, spec: BucketSpec, wait_s: float) -> None:
        retry_after_s = max(1, math.ceil(wait_s))
        message = f"The limit of {spec.text} is reached; try again in {retry_after_s} s."
        super().__init__(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self._unit = spec.unit

    @property
    def type(self) -> str:
        """OpenAI's word for which limit it is: requests or tokens."""
        return self._unit


class TokenBucket:
    """Permits that come at a rate and pile up to a burst, with which it starts.

    Whatever is taken, given back or waited for: within any `t` seconds no more than
    `rate_per_s * t + burst` permits are out on balance.
    """

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._filled_at_s = now_s

    def level(self, now_s: float) -> float:
        """Permits that can be taken now; below 0 where some are owed."""
        self._fill(now_s)
        return self._level

    def take(self, amount: float, now_s: float) -> float:
        """Take all of `amount` and return 0, or take nothing and return the seconds to wait for
        it.

        An amount above the burst waits for ever.
        """
        self._fill(now_s)
        missing = amount - self._level
        if missing > EPSILON:
            return math.inf if amount > self.burst else missing / self.rate_per_s
        self._level = max(0.0, self._level - amount)
        return 0.0

    def take_up_to(self, amount: float, now_s: float) -> float:
        """Take as much of `amount` as is there; returns what was taken."""
        self._fill(now_s)
        taken = min(amount, max(0.0, self._level))
        self._level -= taken
        return taken

    def give_back(self, amount: float, now_s: float) -> None:
        """Return permits that were taken and not used; what is above the burst is lost."""
        self._fill(now_s)
        self._level = min(self.burst, self._level + amount)

    def owe(self, amount: float) -> None:
        """Take permits that are still to come: nobody else gets any before they have."""
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._filled_at_s)
        self._level = min(self.burst, self._level + passed_s * self.rate_per_s)
        self._filled_at_s = max(self._filled_at_s, now_s)
