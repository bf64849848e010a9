"""Chats of several turns over replicas that keep what they computed, without Ray or a model: what a
way of choosing replicas is worth.

Owns the replay: replicas with an LRU of blocks each, who computes what is not in it, at so many
tokens a second. Knows of a chooser only that it orders replicas.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.engine.block_hash import extend_block_hashes
from deployments.protocol import GenerateRequest, SamplingParams
from deployments.replica_choice import ReplicaChooser, ReplicaReport

BLOCK_SIZE = 16


class Choice(Protocol):
    """A way to choose a replica."""

    def choose(self, request: GenerateRequest) -> int:
        """The replica that gets this request; it counts there until it ends."""
        ...

    def end(self, request: GenerateRequest) -> None:
        """The request has ended."""
        ...


class ByPrefix:
    """The product's rule."""

    def __init__(
        self,
        num_replicas: int,
        num_blocks: int,
        slack_tokens: int = 512,
        balance_factor: float = 1.25,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._chooser = ReplicaChooser(balance_factor, slack_tokens, block_size)
        self._chooser.set_replicas(map(str, range(num_replicas)))
        for index in range(num_replicas):
            self._chooser.report(str(index), ReplicaReport(0, num_blocks))

    def choose(self, request: GenerateRequest) -> int:
        """See Choice."""
        name = self._chooser.find_order(request)[0]
        self._chooser.begin(name, request.request_id, request)
        return int(name)

    def end(self, request: GenerateRequest) -> None:
        """See Choice."""
        self._chooser.end(request.request_id)


class ByChance:
    """Any replica, or the shorter queue of two: what Ray Serve does by itself."""

    def __init__(self, num_replicas: int, num_looked_at: int, rng: random.Random) -> None:
        self._queues = [0] * num_replicas
        self._num_looked_at = num_looked_at
        self._rng = rng
        self._chosen: dict[str, int] = {}

    def choose(self, request: GenerateRequest) -> int:
        """See Choice."""
        looked_at = self._rng.sample(range(len(self._queues)), self._num_looked_at)
        index = min(looked_at, key=lambda i: self._queues[i])
        self._queues[index] += 1
        self._chosen[request.request_id] = index
        return index

    def end(self, request: GenerateRequest) -> None:
        """See Choice."""
        self._queues[self._chosen.pop(request.request_id)] -= 1


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """What a replay measured."""

    hit_rate: float
    """Share of prompt tokens that were in the chosen replica's cache."""
    best_hit_rate: float
    """The share that one endless cache would have had."""
    imbalance: float
    """Tokens computed by the busiest replica over the mean."""
    mean_wait_s: float
    """From a request's arrival until its prompt has been computed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes."""

    at_s: float
    request: GenerateRequest


def chat_workload(
    num_chats: int, num_turns: int, rng: random.Random, *, gap_s: float = 20.0
) -> list[Arrival]:
    """Chats under one of four system prompts of 300 tokens; every turn adds 100 to 400 tokens and
    comes after a pause of `gap_s` on average.
    """
    systems = [[rng.randrange(1, 10_000) for _ in range(300)] for _ in range(4)]
    arrivals = []
    for chat in range(num_chats):
        tokens = list(rng.choice(systems))
        at_s = rng.uniform(0.0, gap_s * num_turns / 2)
        for turn in range(num_turns):
            tokens = tokens + [rng.randrange(1, 10_000) for _ in range(rng.randrange(100, 400))]
            arrivals.append(Arrival(at_s, _request(f"{chat}-{turn}", tokens)))
            at_s += rng.expovariate(1.0 / gap_s)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _request(request_id: str, tokens: Sequence[int]) -> GenerateRequest:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, (len(tokens) - 1) // BLOCK_SIZE, BLOCK_SIZE, "")
    params = SamplingParams(max_tokens=128)
    return GenerateRequest(request_id, tuple(tokens), params, block_hashes=tuple(hashes))


class _FakeReplica:
    """Computes prompts one after the other, and keeps the blocks of the last ones."""

    def __init__(self, num_blocks: int, tokens_per_s: float) -> None:
        self._num_blocks = num_blocks
        self._tokens_per_s = tokens_per_s
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._free_at_s = 0.0
        self.num_computed = 0

    def take(self, arrival: Arrival) -> tuple[int, float]:
        """Tokens found in the cache, and when the prompt is done."""
        hashes = arrival.request.block_hashes
        num_hits = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))
        for block_hash in reversed(hashes):
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        num_tokens = len(arrival.request.prompt_token_ids) - num_hits * BLOCK_SIZE
        self.num_computed += num_tokens
        begins_s = max(self._free_at_s, arrival.at_s)
        self._free_at_s = begins_s + num_tokens / self._tokens_per_s
        return num_hits * BLOCK_SIZE, self._free_at_s


def replay(
    arrivals: Sequence[Arrival],
    choice: Choice,
    num_replicas: int,
    *,
    num_blocks: int = 4000,
    tokens_per_s: float = 5000.0,
    answer_s: float = 4.0,
) -> RoutingResult:
    """Send all requests through a choice; each ends `answer_s` after its prompt was computed."""
    replicas = [_FakeReplica(num_blocks, tokens_per_s) for _ in range(num_replicas)]
    ends: list[tuple[float, int, GenerateRequest]] = []
    num_hits, waits = 0, []
    for number, arrival in enumerate(arrivals):
        while ends and ends[0][0] <= arrival.at_s:
            choice.end(heapq.heappop(ends)[2])
        num_cached, done_s = replicas[choice.choose(arrival.request)].take(arrival)
        num_hits += num_cached
        waits.append(done_s - arrival.at_s)
        heapq.heappush(ends, (done_s + answer_s, number, arrival.request))
    num_tokens = sum(len(arrival.request.prompt_token_ids) for arrival in arrivals)
    computed = [replica.num_computed for replica in replicas]
    return RoutingResult(
        hit_rate=num_hits / num_tokens,
        best_hit_rate=_best_hits(arrivals) / num_tokens,
        imbalance=max(computed) * num_replicas / sum(computed),
        mean_wait_s=sum(waits) / len(waits),
    )


def _best_hits(arrivals: Sequence[Arrival]) -> int:
    endless = _FakeReplica(10**9, 1.0)
    return sum(endless.take(arrival)[0] for arrival in arrivals)


def choices(num_replicas: int, num_blocks: int, seed: int) -> dict[str, Callable[[], Choice]]:
    """The ways that are compared, by name."""
    return {
        "prefix": lambda: ByPrefix(num_replicas, num_blocks),
        "two queues": lambda: ByChance(num_replicas, 2, random.Random(seed)),
        "random": lambda: ByChance(num_replicas, 1, random.Random(seed)),
    }
