"""The order in which waiting requests may start: class, then forced by age, then shortest first.

Owns the order alone; whether a request fits is the scheduler's business.

    class 0   forced:  oldest ... youngest      ready for batch_timeout or longer
              others:  fewest tokens ... most   that the prefix cache did not hold when it queued
    class 1   ...

Forced requests go oldest first, so whoever waits long enough is the next of its class: nobody
starves behind shorter ones (requirement 2.3). A running prefill's age counts from its last chunk;
one that was skipped for the timeout goes before every shorter one in the next step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.engine.request import Request

OrderKey = tuple[int, int, float, int]
"""(class, 0 if forced else 1, moment it became ready if forced else tokens left, arrival)."""


def order_key(request: Request, num_tokens_left: int, now: float, timeout_s: float) -> OrderKey:
    """Sorts waiting requests and running prefills alike: the smaller key goes first."""
    if is_overdue(request, now, timeout_s):
        return (request.priority, 0, request.ready_since_s, request.arrival_index)
    return (request.priority, 1, num_tokens_left, request.arrival_index)


def is_overdue(request: Request, now: float, timeout_s: float) -> bool:
    """Whether its next chunk has been ready for at least the timeout."""
    return now - request.ready_since_s >= timeout_s


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A waiting request at its present place in the order."""

    request: Request
    key: OrderKey

    @property
    def is_forced(self) -> bool:
        """Whether its age put it there."""
        return self.key[1] == 0


class _PriorityClass:
    """The waiting requests of one class, by age and by length at once."""

    def __init__(self) -> None:
        self._num_tokens_left: dict[Request, int] = {}
        # Both sorted. Requests become ready about in order, so that one joins `_by_age` near its
        # end; not always at it, since those preempted in one step are ready at the same moment and
        # join least urgent first.
        self._by_age: list[tuple[float, int, Request]] = []
        self._by_length: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._num_tokens_left)

    def __contains__(self, request: Request) -> bool:
        return request in self._num_tokens_left

    def add(self, request: Request, num_tokens_left: int) -> None:
        self._num_tokens_left[request] = num_tokens_left
        index = request.arrival_index
        insort(self._by_age, (request.ready_since_s, index, request), key=lambda e: e[:2])
        insort(self._by_length, (num_tokens_left, index, request), key=lambda e: e[:2])

    def remove(self, request: Request) -> None:
        index = request.arrival_index
        by_length = (self._num_tokens_left.pop(request), index)
        by_age = (request.ready_since_s, index)
        del self._by_length[bisect_left(self._by_length, by_length, key=lambda e: e[:2])]
        del self._by_age[bisect_left(self._by_age, by_age, key=lambda e: e[:2])]

    def in_order(self, now: float, timeout_s: float) -> Iterator[QueuedRequest]:
        for _, _, request in self._by_age:
            if not is_overdue(request, now, timeout_s):
                break
            num_tokens_left = self._num_tokens_left[request]
            yield QueuedRequest(request, order_key(request, num_tokens_left, now, timeout_s))
        for num_tokens_left, _, request in self._by_length:
            if not is_overdue(request, now, timeout_s):
                yield QueuedRequest(request, order_key(request, num_tokens_left, now, timeout_s))

    def __iter__(self) -> Iterator[Request]:
        return iter(self._num_tokens_left)

    @property
    def oldest(self) -> Request:
        return self._by_age[0][2]


class WaitingQueue:
    """All waiting requests of a replica.

    Args:
        timeout_s: after so long a request is forced ahead of the shorter ones of its class.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._classes: dict[int, _PriorityClass] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, request: Request) -> bool:
        return request in self._classes.get(request.priority, ())

    def __iter__(self) -> Iterator[Request]:
        for members in self._classes.values():
            yield from members

    def add(self, request: Request, num_tokens_left: int) -> None:
        """Queue a request that became ready just now and has so many tokens to compute."""
        self._classes.setdefault(request.priority, _PriorityClass()).add(request, num_tokens_left)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands.

        Raises:
            KeyError: it is not queued.
        """
        members = self._classes[request.priority]
        members.remove(request)
        self._num_requests -= 1
        if not members:
            del self._classes[request.priority]

    def in_order(self, now: float) -> Iterator[QueuedRequest]:
        """The requests as they should start at `now`, lazily; do not change the queue while
        reading.
        """
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_order(now, self._timeout_s)

    def find_head(self, now: float) -> Request | None:
        """The request that should start next; None if nobody waits."""
        head = next(self.in_order(now), None)
        return None if head is None else head.request

    def num_tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return sum(request.num_tokens for request in self)

    def find_hold_until_s(self, now: float, num_tokens: int) -> float | None:
        """Until when to wait for more prompts, if fewer than `num_tokens` tokens wait and nobody
        has waited for the timeout; None: no longer.
        """
        if not self or self.num_tokens() >= num_tokens:
            return None
        deadline_s = self._timeout_s + min(
            members.oldest.ready_since_s for members in self._classes.values()
        )
        return deadline_s if now < deadline_s else None
