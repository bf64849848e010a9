"""What every service is asked: the workloads W1 to W6, the same requests for each.

    W1       decode-heavy   64 requests, 16 at a time: 64 tokens in, 128 out
    W2       mixed          60 requests, Poisson; 1 of 8 long (2048 in, 32 out), others 64 and 64
    W2cap    capacity       the same 60, always 24 in flight
    W2half   load           the same 60, Poisson at half of the service's own W2cap
    W2most   load           the same 60, Poisson at 0.8 of it
    W3       stall          8 decodes (64 in, 256 out); at 3 s one prompt of 4096
    W4       prefix         1024 shared tokens + 64 own: 1, then 15 requests, 4 at a time, 32 out
    W5       single stream  64 in, 128 out, alone
    W6       prefill        one prompt of 4096
    W6chunk  prefill        one prompt of 512

Owns lengths and times. Does not know what prompts say (`loadtest.prompts` does) or who is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from loadtest.send_times import steady_times
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest

SHORT, LONG = "short", "long"
FIRST, HIT = "first", "hit"
ALL = "all"
NUM_PREFIX_BLOCKS = 2
PROMPTS_PER_ROUND = 100_000
PROMPTS_PER_WORKLOAD = 1_000
LONG_EVERY = 8
OWN_CAPACITY_SHARES = {"W2half": 0.5, "W2most": 0.8}
"""Workloads whose rate is a share of what the same service reached in W2cap."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each workload is sent.

    Args:
        scale: multiplies numbers of requests, never lengths or how many are in flight.
        rate: of W2, requests per second.
    """

    scale: float = 1.0
    rate: float = 0.7

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 100.0:
            raise ValueError(f"--scale must be above 0 and at most 100, not {self.scale:g}")
        if not 0.0 < self.rate <= 1000.0:
            raise ValueError(f"--rate must be above 0 and at most 1000, not {self.rate:g}")

    def num_requests(self, whole: int, least: int) -> int:
        """Of a workload that has so many at scale 1; never fewer than fill what is in flight."""
        return max(least, round(whole * self.scale))


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request of a workload.

    Args:
        label: what its figures are counted under.
        lengths: of its prompt and answer, and what it shares.
        number: of its prompt; the same number and lengths say the same.
        due_s: from the start of its phase; None: as soon as there is room.
    """

    label: str
    lengths: TraceRequest
    number: int
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are sent together; the next phase begins when all of them have ended."""

    requests: tuple[WorkRequest, ...]
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What one service is asked in one turn."""

    name: str
    phases: tuple[Phase, ...]

    @property
    def num_requests(self) -> int:
        """Of all phases."""
        return sum(len(phase.requests) for phase in self.phases)


Builder = Callable[[Sizes, int], tuple[Phase, ...]]
"""Makes the phases from the sizes and the number of the first prompt."""


def build_workload(name: str, sizes: Sizes, round_number: int) -> Workload:
    """A workload of one round. Equal arguments give equal requests, and no two rounds or workloads
    share a prompt.

    Raises:
        ValueError: there is no workload of that name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}: choose of {', '.join(WORKLOADS)}")
    place = list(WORKLOADS).index(name)
    first_number = round_number * PROMPTS_PER_ROUND + place * PROMPTS_PER_WORKLOAD
    return Workload(name, WORKLOADS[name](sizes, first_number))


def at_rate(sizes: Sizes, rate: float) -> Sizes:
    """The same sizes with another rate of W2."""
    return replace(sizes, rate=rate)


def _decode_heavy(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    return (Phase(_alike(sizes.num_requests(64, 16), ALL, 64, 128, first), 16),)


def _mix(sizes: Sizes, first: int, times_s: Iterable[float | None]) -> tuple[WorkRequest, ...]:
    num_requests = sizes.num_requests(60, LONG_EVERY)
    lengths = {LONG: TraceRequest(0.0, 2048, 32), SHORT: TraceRequest(0.0, 64, 64)}
    requests = []
    for index, due_s in zip(range(num_requests), times_s, strict=False):
        # The middle of each eight, so that the last long one still has others beside it.
        label = LONG if index % LONG_EVERY == LONG_EVERY // 2 else SHORT
        requests.append(WorkRequest(label, lengths[label], first + index, due_s))
    return tuple(requests)


def _mixed(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    num_requests = sizes.num_requests(60, LONG_EVERY)
    times_s = steady_times(num_requests, sizes.rate, seed=first)
    return (Phase(_mix(sizes, first, times_s)),)


def _mixed_capacity(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    return (Phase(_mix(sizes, first, (None for _ in count())), 24),)


def _stall(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    decodes = [WorkRequest(SHORT, TraceRequest(0.0, 64, 256), first + i, 0.0) for i in range(8)]
    long = WorkRequest(LONG, TraceRequest(0.0, 4096, 8), first + 8, 3.0)
    return (Phase((*decodes, long)),)


def _prefix(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    shared = tuple(NUM_PREFIX_BLOCKS * first + block for block in range(NUM_PREFIX_BLOCKS))
    lengths = TraceRequest(0.0, NUM_PREFIX_BLOCKS * HASH_BLOCK_TOKENS + 64, 32, shared)
    hits = [WorkRequest(HIT, lengths, first + 1 + i) for i in range(sizes.num_requests(15, 4))]
    return Phase((WorkRequest(FIRST, lengths, first),)), Phase(tuple(hits), 4)


def _single_stream(sizes: Sizes, first: int) -> tuple[Phase, ...]:
    return (Phase(_alike(1, ALL, 64, 128, first), 1),)


def _prefill(num_tokens: int) -> Builder:
    def build(sizes: Sizes, first: int) -> tuple[Phase, ...]:
        return (Phase(_alike(1, ALL, num_tokens, 1, first), 1),)

    return build


def _alike(num: int, label: str, num_in: int, num_out: int, first: int) -> tuple[WorkRequest, ...]:
    lengths = TraceRequest(0.0, num_in, num_out)
    return tuple(WorkRequest(label, lengths, first + index) for index in range(num))


WORKLOADS: Mapping[str, Builder] = {
    "W1": _decode_heavy,
    "W2": _mixed,
    "W2cap": _mixed_capacity,
    "W2half": _mixed,
    "W2most": _mixed,
    "W3": _stall,
    "W4": _prefix,
    "W5": _single_stream,
    "W6": _prefill(4096),
    "W6chunk": _prefill(512),
}
