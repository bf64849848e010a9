"""What a load consists of: how long each request is, what it says, and when it is due.

    lengths and times (a trace, or drawn) ─┐
    words of a prompt ─────────────────────┼─► PlannedRequest, made one by one as they become due
    send times (rate, ramp, the trace's) ──┘

Knows neither HTTP nor how requests are sent.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from loadtest.client import Ask
from loadtest.load_prompts import Prompts
from loadtest.load_run import PlannedRequest
from loadtest.trace import TraceRequest


class WorkloadError(ValueError):
    """A workload that cannot be made; the message is one line and says what to change."""


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """So many requests of drawn lengths, drawn anew each time they are read.

    Args:
        num_requests: how many.
        input_len: prompt tokens.
        output_len: output tokens.
        prefix_len: prompt tokens before `input_len`, the same for all: block 0 of each.
        range_ratio: lengths are drawn evenly from (1 ± range_ratio) times these.
        seed: of the lengths.

    Raises:
        WorkloadError: a number out of range.
    """

    num_requests: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_requests, self.input_len, self.output_len) < 1:
            raise WorkloadError("numbers of prompts and lengths must be at least 1")
        if self.prefix_len < 0:
            raise WorkloadError(f"the prefix must have 0 or more tokens, not {self.prefix_len}")
        if not 0.0 <= self.range_ratio < 1.0:
            raise WorkloadError(f"the range ratio must be in [0, 1), not {self.range_ratio:g}")

    def __len__(self) -> int:
        return self.num_requests

    def __contains__(self, request: object) -> bool:
        return any(request == own for own in self)

    def __iter__(self) -> Iterator[TraceRequest]:
        chance = random.Random(self.seed)
        hash_ids = (0,) if self.prefix_len else ()
        for _ in range(self.num_requests):
            input_length = self.prefix_len + self._draw(chance, self.input_len)
            yield TraceRequest(0.0, input_length, self._draw(chance, self.output_len), hash_ids)

    def _draw(self, chance: random.Random, length: int) -> int:
        spread = int(length * self.range_ratio)
        return max(1, chance.randint(length - spread, length + spread))


def own_times(requests: Collection[TraceRequest]) -> Iterator[float]:
    """When each request of a trace is due: seconds after the first one."""
    first_s = next(iter(requests)).timestamp_s
    return (request.timestamp_s - first_s for request in requests)


def plan_requests(
    requests: Iterable[TraceRequest],
    prompts: Prompts,
    times_s: Iterable[float | None],
    numbers: Iterable[int] | None = None,
) -> Iterator[PlannedRequest]:
    """One request after the other, its prompt made when it is asked for.

    Args:
        requests: their lengths and priorities.
        prompts: make their words.
        times_s: when they are due, from the start of the run; None: as soon as there is room.
        numbers: of the prompts; by default from 0 on.
    """
    numbered = zip(count() if numbers is None else numbers, requests, times_s, strict=False)
    for number, request, due_s in numbered:
        ask = Ask(prompts.prompt(request, number), request.output_length, request.priority)
        yield PlannedRequest(ask, request.input_length, due_s)
