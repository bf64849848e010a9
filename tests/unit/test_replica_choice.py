"""Which replica a request is sent to: sequences of requests, reports and ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from deployments.protocol import GenerateRequest, SamplingParams
from deployments.replica_choice import (
    EXPECTED_OUTPUT_TOKENS,
    PrefixIndex,
    ReplicaChooser,
    ReplicaReport,
    count_tokens,
)
from loadtest.routing_workload import chat_workload, choices, replay

BLOCK = 4


def hashes(text: str) -> tuple[bytes, ...]:
    """One chained hash a letter: "ab" and "ac" share their first block."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def request(text: str, request_id: str = "r", max_tokens: int = 1) -> GenerateRequest:
    tokens = tuple(range(len(text) * BLOCK))
    params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id, tokens, params, block_hashes=hashes(text))


def chooser(num_replicas: int = 3, factor: float = 1.25, slack: int = 0) -> ReplicaChooser:
    made = ReplicaChooser(factor, slack, BLOCK)
    made.set_replicas(names(num_replicas))
    return made


def names(num_replicas: int) -> Sequence[str]:
    return [f"replica-{index}" for index in range(num_replicas)]


def send(to: ReplicaChooser, asked: GenerateRequest, key: str) -> str:
    """As the router does: choose, count, accept."""
    name = to.find_order(asked)[0]
    to.begin(name, key, asked)
    to.confirm(name, asked)
    return name


def test_turns_of_one_chat_stay_together() -> None:
    """The second turn of a chat computes the first again, on another replica."""
    to = chooser()
    first = send(to, request("abc", "1"), "1")
    to.end("1")
    to.begin(first, "2", request("x"))  # a little busier than the others
    assert send(to, request("abcde", "3"), "3") == first


def test_the_longest_prefix_wins() -> None:
    """A replica that holds a system prompt draws a chat from the one that holds all of it."""
    to = chooser(2)
    long, short = names(2)
    to.begin(long, "1", request("abcd"))
    to.begin(short, "2", request("ab"))
    to.end("1")
    to.end("2")
    assert to.find_order(request("abcdef"))[0] == long
    assert [to.num_matched(name, hashes("abcdef")) for name in (long, short)] == [4, 2]


def test_a_burst_with_nothing_cached_spreads() -> None:
    """Requests that come at once all go to the replica that was idle when the first was chosen."""
    to = chooser(4)
    chosen = [send(to, request(letter * 3, letter), letter) for letter in "abcdefgh"]
    assert sorted(chosen) == sorted(list(names(4)) * 2)


def test_a_cache_is_not_worth_any_queue() -> None:
    """One popular prefix sends all requests to one replica while others are idle."""
    to = chooser(2, slack=0)
    chosen = [send(to, request("ab" * 10, str(number)), str(number)) for number in range(10)]
    assert 4 <= chosen.count(chosen[0]) <= 6


def test_waiting_is_accepted_for_as_many_tokens_as_it_saves() -> None:
    """A long chat is moved, and computed anew, because of one small request on its replica."""
    to = chooser(2)
    owner, other = names(2)
    to.begin(owner, "1", request("a" * 100))
    to.end("1")
    to.begin(owner, "2", request("x" * 50))  # 200 tokens wait, 400 are saved
    assert to.find_order(request("a" * 100)) == [owner, other]
    to.begin(owner, "3", request("y" * 60))
    assert to.find_order(request("a" * 100)) == [other, owner]


def test_an_ended_request_counts_no_more_and_only_once() -> None:
    """Load leaks: a replica looks busy for ever, or less than idle."""
    to = chooser(1)
    (name,) = names(1)
    to.begin(name, "1", request("abc", max_tokens=10))
    assert to.num_outstanding(name) == 3 * BLOCK + 10
    to.begin(name, "1", request("abc", max_tokens=10))  # told again: it moved to where it was
    to.end("1")
    to.end("1")
    assert to.num_outstanding(name) == 0


def test_an_answer_of_unknown_length_counts_for_a_usual_one() -> None:
    """max_tokens of a whole context makes one short chat outweigh ten long prompts."""
    assert count_tokens(request("ab", max_tokens=8000)) == 2 * BLOCK + EXPECTED_OUTPUT_TOKENS


def test_a_report_adds_what_others_sent() -> None:
    """Two ingresses see half of the load each, and overload the replica the other one uses."""
    to = chooser(2)
    busy, idle = names(2)
    to.begin(busy, "1", request("abc"))
    to.report(busy, ReplicaReport(outstanding_tokens=1013, num_blocks=100))
    assert to.num_outstanding(busy) == 1013
    to.end("1")
    assert to.num_outstanding(busy) == 1000
    to.report(busy, ReplicaReport(outstanding_tokens=0, num_blocks=100))
    assert to.num_outstanding(busy) == 0
    assert set(to.find_order(request("q"))) == {busy, idle}


def test_what_a_replica_must_have_evicted_is_not_expected_of_it() -> None:
    """The index remembers prompts that the replica's cache dropped long ago."""
    to = chooser(1)
    (name,) = names(1)
    to.report(name, ReplicaReport(0, num_blocks=4))
    to.begin(name, "1", request("abc"))
    to.begin(name, "2", request("xyz"))
    assert to.num_matched(name, hashes("xyz")) == 3
    assert to.num_matched(name, hashes("abc")) == 1  # its end was forgotten first
    to.report(name, ReplicaReport(0, num_blocks=0))  # keeps no prefixes at all
    assert to.num_matched(name, hashes("xyz")) == 0


@pytest.mark.parametrize("how", ["gone", "unavailable"])
def test_nothing_is_expected_of_a_replica_that_died(how: str) -> None:
    """A replica that comes back empty is preferred for a cache that it has lost."""
    to = chooser(2)
    name = send(to, request("abc"), "1")
    if how == "gone":
        to.set_replicas([other for other in names(2) if other != name])
        assert name not in to.find_order(request("abc", "2"))
        to.end("1")  # comes late
        to.set_replicas(names(2))
    else:
        to.forget_cache(name)
    assert to.num_matched(name, hashes("abc")) == 0


def test_a_retry_goes_elsewhere() -> None:
    """A replica whose engine is dead refuses at once, so it is always the least loaded, and a retry
    goes there again."""
    to = chooser(3)
    asked = request("abc")
    first = send(to, asked, "1")
    to.end("1")
    second = send(to, asked, "2")
    to.end("2")
    third = send(to, asked, "3")
    to.end("3")
    assert {first, second, third} == set(names(3))
    assert len(to.find_order(asked)) == 3  # with all tried, any will do


def test_no_replicas_is_an_empty_order() -> None:
    """The router fails while all replicas are away."""
    assert ReplicaChooser(1.25, 0, BLOCK).find_order(request("abc")) == []


def test_a_known_part_of_a_prompt_is_always_a_prefix() -> None:
    """The index is searched by halves, which is wrong once a middle block is missing."""
    rng = random.Random(1)
    index = PrefixIndex(40)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 30)))
        index.touch(hashes(text))
        probe = hashes("".join(rng.choice("ab") for _ in range(20)))
        known = [block in index._hashes for block in probe]
        assert known == sorted(known, reverse=True)
        assert index.num_matched(probe) == sum(known)
        assert len(index) <= 40


def test_chats_hit_caches_and_load_stays_even() -> None:
    """Prefix-aware routing is worth nothing beside Serve's own choice, or piles up on few."""
    arrivals = chat_workload(100, 6, random.Random(5))
    results = {
        name: replay(arrivals, make(), 4, num_blocks=4000)
        for name, make in choices(4, 4000, seed=5).items()
    }
    prefix, queues = results["prefix"], results["two queues"]
    assert prefix.hit_rate > 0.85 * prefix.best_hit_rate
    assert prefix.hit_rate > 1.4 * queues.hit_rate
    assert prefix.imbalance < 1.15
    assert prefix.mean_wait_s < 0.7 * queues.mean_wait_s
    assert max(results, key=lambda name: results[name].hit_rate) == "prefix"
