"""When and how long the requests of a trace are: new arrivals, ticks spread, times and lengths
scaled.

Each function gives new requests and leaves the old; the same seed gives the same ones. The gaps
themselves are those of `send_times`, as the client sends them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from loadtest.send_times import RampUp, ramped_times, steady_times
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, TraceRequest

MOONCAKE_TICK_S = 3.0
"""The grid that the timestamps of Mooncake's conversation trace stand on."""


def arriving_at(
    requests: Sequence[TraceRequest], rate: float, burstiness: float = 1.0, seed: int = 0
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
    requests: Sequence[TraceRequest], ramp_up: RampUp, burstiness: float = 1.0, seed: int = 0
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
    _check_factor("tick", tick_s)
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
    _check_factor("time scale", factor)
    return [replace(each, timestamp_s=each.timestamp_s * factor) for each in requests]


def scale_lengths(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """Make every prompt and answer longer or shorter, of one token at least.

    What prompts share scales with them: a new block is named by the old blocks that it is made of,
    so that two requests share it exactly if they shared all of those.

    Raises:
        TraceError: a factor that is not above 0.
    """
    _check_factor("length scale", factor)
    names = _BlockNames()
    return [
        replace(
            each,
            input_length=_scaled(each.input_length, factor),
            output_length=_scaled(each.output_length, factor),
            hash_ids=_scaled_ids(each, factor, names),
        )
        for each in requests
    ]


def within(requests: Iterable[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """Those from `start_s` to before `end_s`, with times from `start_s`.

    Raises:
        TraceError: there are none.
    """
    found = [
        replace(each, timestamp_s=each.timestamp_s - start_s)
        for each in requests
        if start_s <= each.timestamp_s < end_s
    ]
    if not found:
        raise TraceError(f"no request from {start_s:g} s to {end_s:g} s: choose another stretch")
    return found


class _BlockNames:
    """Numbers for new blocks, by what they are made of."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}

    def id_of(self, content: Hashable) -> int:
        return self._ids.setdefault(content, len(self._ids))


def _scaled_ids(request: TraceRequest, factor: float, names: _BlockNames) -> tuple[int, ...]:
    """Ids of the new blocks that hold what the old ones held.

    At factor 0.5, new block 1 is made of old blocks 2 and 3; at 2, of the second half of block 0.
    """
    if factor == 1.0:
        return request.hash_ids
    num_tokens = min(len(request.hash_ids) * HASH_BLOCK_TOKENS, request.input_length)
    num_blocks = math.ceil(_scaled(num_tokens, factor) / HASH_BLOCK_TOKENS) if num_tokens else 0
    ids = []
    for index in range(num_blocks):
        # In old blocks; rounded, so that a third of a block thrice is a block.
        start = round(index / factor, 9)
        end = min(round((index + 1) / factor, 9), len(request.hash_ids))
        made_of = request.hash_ids[int(start) : math.ceil(end)]
        ids.append(names.id_of((start - int(start), made_of)))
    return tuple(ids)


def _scaled(num_tokens: int, factor: float) -> int:
    return max(1, round(num_tokens * factor))


def _at(requests: Sequence[TraceRequest], times_s: Iterable[float]) -> list[TraceRequest]:
    return [
        replace(each, timestamp_s=time_s) for each, time_s in zip(requests, times_s, strict=True)
    ]


def _check_factor(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise TraceError(f"the {name} must be a number above 0, not {value:g}")
