"""Class, then age, then length (requirement 2.3)."""

from __future__ import annotations

from doubles import make_request
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.request import Request
from deployments.engine.waiting_queue import WaitingQueue

TIMEOUT_S = 1.0


class Arrivals:
    """A queue and the requests in it, named by their place of arrival."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(TIMEOUT_S)
        self.requests: list[Request] = []

    def add(self, num_tokens: int, at: float = 0.0, priority: int = 0) -> Request:
        incoming = make_request(num_tokens, priority=priority)
        index = len(self.requests)
        request = Request.arrive(incoming, now=at, index=index, seed=0, max_num_tokens=1000)
        self.requests.append(request)
        self.queue.add(request, num_tokens)
        return request

    def order(self, now: float) -> list[int]:
        return [entry.request.arrival_index for entry in self.queue.in_order(now)]


def test_the_shorter_goes_first() -> None:
    """A short prompt waits for a long one that came before it."""
    arrivals = Arrivals()
    for num_tokens in (30, 10, 20, 10):
        arrivals.add(num_tokens)
    assert arrivals.order(now=0.5) == [1, 3, 2, 0]


def test_a_more_urgent_class_goes_before_all_of_the_next() -> None:
    """Length or age put a request before one of a more urgent class."""
    arrivals = Arrivals()
    arrivals.add(1, at=0.0, priority=1)
    arrivals.add(90, at=5.0, priority=0)
    assert arrivals.order(now=5.1) == [1, 0]


def test_a_forced_chunk_goes_before_any_shorter_one_of_its_class() -> None:
    """2.3: a long prompt waits beyond batch_timeout while shorter ones keep coming."""
    arrivals = Arrivals()
    arrivals.add(500, at=0.0)
    arrivals.add(2, at=0.5)
    assert arrivals.order(now=0.99) == [1, 0]
    assert arrivals.order(now=1.0) == [0, 1]
    assert [entry.is_forced for entry in arrivals.queue.in_order(1.0)] == [True, False]


def test_the_forced_go_oldest_first() -> None:
    """Of those that waited too long, a younger one goes first because it is shorter."""
    arrivals = Arrivals()
    for at, num_tokens in ((0.0, 30), (0.1, 20), (0.2, 10)):
        arrivals.add(num_tokens, at)
    assert arrivals.order(now=2.0) == [0, 1, 2]


def test_those_ready_at_the_same_moment_go_by_arrival() -> None:
    """Victims of one step, which queue least urgent first, age in that order."""
    arrivals = Arrivals()
    first, second = arrivals.add(10), arrivals.add(10)
    for request in (first, second):
        arrivals.queue.remove(request)
    for request in (second, first):
        request.ready_since_s = 3.0
        arrivals.queue.add(request, 10)
    assert arrivals.order(now=9.0) == [0, 1]


def test_removal_from_anywhere() -> None:
    """A request that left the queue is still in one of its orders."""
    arrivals = Arrivals()
    requests = [arrivals.add(10 + index % 3, priority=index % 2) for index in range(6)]
    for request in (requests[2], requests[5], requests[0]):
        arrivals.queue.remove(request)
        assert request not in arrivals.queue
    assert set(arrivals.order(0.0)) == set(arrivals.order(9.0)) == {1, 3, 4}
    assert len(arrivals.queue) == 3 and set(arrivals.queue) == {requests[i] for i in (1, 3, 4)}
    assert arrivals.queue.num_tokens() == sum(requests[i].num_tokens for i in (1, 3, 4))


def test_the_head_and_how_long_it_may_be_held() -> None:
    """The head is not the first in order, or more prompts are waited for beyond the timeout of the
    oldest one, or although enough tokens are there.
    """
    arrivals = Arrivals()
    assert arrivals.queue.find_head(0.0) is None
    assert arrivals.queue.find_hold_until_s(0.0, num_tokens=100) is None
    arrivals.add(30, at=0.25, priority=2)
    short = arrivals.add(3, at=0.5, priority=1)
    assert arrivals.queue.find_head(0.5) is short
    oldest_is_forced_s = 0.25 + TIMEOUT_S
    assert arrivals.queue.find_hold_until_s(0.5, num_tokens=34) == oldest_is_forced_s
    assert arrivals.queue.find_hold_until_s(0.5, num_tokens=33) is None
    assert arrivals.queue.find_hold_until_s(oldest_is_forced_s, num_tokens=34) is None


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2), st.sampled_from([0.0, 0.3, 1.1]))),
    st.sampled_from([0.0, 1.0, 1.3, 9.0]),
)
def test_the_order_is_that_of_the_keys(arriving: list[tuple[int, int, float]], now: float) -> None:
    """What the scheduler merges with running prefills by key does not come sorted by key."""
    arrivals = Arrivals()
    at = 0.0
    for num_tokens, priority, delay_s in arriving:
        at += delay_s
        arrivals.add(num_tokens, at, priority)
    entries = list(arrivals.queue.in_order(at + now))
    assert [entry.key for entry in entries] == sorted(entry.key for entry in entries)
    assert len(entries) == len(arriving)
