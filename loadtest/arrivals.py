"""When the requests of a trace come: new arrivals, ticks spread, times scaled.

Each function gives new requests and leaves the old; the same seed gives the same ones. The gaps
themselves are those of `send_times`, as the client sends them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import replace

from loadtest.send_times import RampUp, ramped_times, steady_times
from loadtest.trace import TraceError, TraceRequest

MAX_FACTOR = 1e6
MOONCAKE_TICK_S = 3.0
"""The grid that the timestamps of Mooncake's conversation trace stand on."""


def arriving_at(
    requests: Collection[TraceRequest], rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """The same requests in the same order, at random times of a steady rate.

    Args:
        requests: their times are dropped.
        rate: requests per second; inf: all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson.
        seed: of the gaps.

    Raises:
        SendTimesError: a rate or burstiness that is not above 0.
    """
    return _at(requests, steady_times(len(requests), rate, burstiness, seed))


def ramping_up(
    requests: Collection[TraceRequest], ramp_up: RampUp, burstiness: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """The same requests in the same order, at random times of a rate that changes.

    Raises:
        SendTimesError: a burstiness that is not above 0.
    """
    return _at(requests, ramped_times(len(requests), ramp_up, burstiness, seed))


def spread_ticks(
    requests: Iterable[TraceRequest], tick_s: float = MOONCAKE_TICK_S, seed: int = 0
) -> list[TraceRequest]:
    """Move each request by a uniformly random part of a tick, later.

    A trace whose clock ticks every few seconds would else send all of a tick at one instant.

    Raises:
        TraceError: a tick that is not above 0.
    """
    check_factor("tick", tick_s)
    chance = random.Random(seed)
    spread = [
        replace(each, timestamp_s=each.timestamp_s + tick_s * chance.random()) for each in requests
    ]
    return sorted(spread, key=lambda request: request.timestamp_s)


def scale_times(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """Stretch the time of a trace: 0.5 offers twice the rate, 2 half of it.

    Raises:
        TraceError: a factor that is not above 0.
    """
    check_factor("time scale", factor)
    return [replace(each, timestamp_s=each.timestamp_s * factor) for each in requests]


def within(requests: Iterable[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """Those from `start_s` to before `end_s`, with times from `start_s`.

    Raises:
        TraceError: there are none, or the end is not after the start.
    """
    if not start_s < end_s:
        raise TraceError(f"no stretch goes from {start_s:g} s to {end_s:g} s: give a later end")
    found = [
        replace(each, timestamp_s=each.timestamp_s - start_s)
        for each in requests
        if start_s <= each.timestamp_s < end_s
    ]
    if not found:
        raise TraceError(f"no request from {start_s:g} s to {end_s:g} s: choose another stretch")
    return found


def _at(requests: Collection[TraceRequest], times_s: Iterable[float]) -> list[TraceRequest]:
    return [
        replace(each, timestamp_s=time_s) for each, time_s in zip(requests, times_s, strict=True)
    ]


def check_factor(name: str, value: float) -> None:
    """Refuse what no trace can be scaled by.

    Raises:
        TraceError: it is not above 0, or so large that times and lengths lose their meaning.
    """
    if not 0.0 < value <= MAX_FACTOR:
        raise TraceError(
            f"the {name} must be a number above 0, at most {MAX_FACTOR:g}, not {value:g}"
        )
