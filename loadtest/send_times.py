"""When the requests of an open loop are meant to be sent: rate, burstiness, ramp-up.

Made one by one, so that a run of hours holds none of them. The same seed gives the same times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


class SendTimesError(ValueError):
    """A rate, burstiness or ramp that gives no times; the message says what to change."""


class RampStrategy(str, Enum):
    """How the rate goes from its start to its end over a run."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that changes from request to request, as `vllm bench serve` defines it.

    Args:
        strategy: linear in the number of the request, or by equal factors.
        start_rps: requests per second of the first request.
        end_rps: of the last one.
    """

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if min(self.start_rps, self.end_rps) <= 0.0:
            raise SendTimesError("both rates of a ramp-up must be above 0 requests per second")

    def rate(self, index: int, num_requests: int) -> float:
        """Requests per second at the request of this index."""
        progress = index / max(num_requests - 1, 1)
        if self.strategy is RampStrategy.LINEAR:
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def steady_times(
    num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> Iterator[float]:
    """Seconds from the start of a run, ascending; the last one is exactly `num_requests / rate`, so
    that what is offered does not depend on the seed.

    Args:
        num_requests: how many.
        rate: requests per second; inf sends all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, smaller comes in
            bursts, larger is more even, inf is a metronome.
        seed: of the gaps.

    Raises:
        SendTimesError: a rate or burstiness that is not above 0.
    """
    _check("request rate", rate)
    _check("burstiness", burstiness)
    if math.isinf(rate):
        return iter([0.0] * num_requests)
    # Drawn twice rather than kept: once for the sum, once to send by.
    drawn_s = sum(_gaps(num_requests, lambda _: rate, burstiness, seed))
    return _times(num_requests, lambda _: rate * drawn_s * rate / num_requests, burstiness, seed)


def ramped_times(
    num_requests: int, ramp_up: RampUp, burstiness: float = 1.0, seed: int = 0
) -> Iterator[float]:
    """Seconds from the start of a run whose rate changes as `ramp_up` says, ascending.

    Raises:
        SendTimesError: a burstiness that is not above 0.
    """
    _check("burstiness", burstiness)
    return _times(num_requests, lambda i: ramp_up.rate(i, num_requests), burstiness, seed)


def _check(name: str, value: float) -> None:
    if not value > 0.0:
        raise SendTimesError(f"the {name} must be above 0, not {value:g}")


def _gaps(
    num_requests: int, rate: Callable[[int], float], burstiness: float, seed: int
) -> Iterator[float]:
    chance = random.Random(seed)
    for index in range(num_requests):
        mean_s = 1.0 / rate(index)
        if math.isinf(burstiness):
            yield mean_s
        else:
            yield chance.gammavariate(burstiness, mean_s / burstiness)


def _times(
    num_requests: int, rate: Callable[[int], float], burstiness: float, seed: int
) -> Iterator[float]:
    now_s = 0.0
    for gap_s in _gaps(num_requests, rate, burstiness, seed):
        now_s += gap_s
        yield now_s
