"""Which replica of a pool a request should go to: the decision alone, without Ray.

Owns what one router believes of its replicas: the blocks each is likely to hold, and the tokens of
the requests each has ("outstanding"). Does not send anything. The belief is built from what was
routed, as SGLang's router does it, and set right by what replicas report.

    prefix index of a replica (LRU):  oldest -> [c2][c1][a3][a2][a1] <- touched last
                                      forgotten first
    A chain is touched from its end to its start, so of each chain the end is forgotten first, and
    what is known of a prompt is always a prefix of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from deployments.protocol import GenerateRequest

EXPECTED_OUTPUT_TOKENS = 256
"""What an answer counts for at most while it runs: max_tokens says what a client allows, not what
it gets."""
MAX_BLOCKS_UNREPORTED = 65536
"""Blocks assumed of a replica that has not reported."""
MAX_TRIED = 4096
"""Requests remembered with the replicas they were sent to."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself: tokens of the requests it has, whoever sent them, and the
    blocks its cache can hold (0: it keeps none).
    """

    outstanding_tokens: int
    num_blocks: int


def count_tokens(request: GenerateRequest, num_cached_tokens: int = 0) -> int:
    """What a request counts for as long as it is open: its prompt but for what is cached, and the
    answer, whose length nobody knows yet. Nobody who routes sees it advance, so it counts in full
    until it ends.
    """
    num_output_tokens = min(request.sampling_params.max_tokens, EXPECTED_OUTPUT_TOKENS)
    return len(request.prompt_token_ids) - num_cached_tokens + num_output_tokens


class PrefixIndex:
    """Hashes of the blocks a replica is thought to hold; at most `max_blocks`, the least recently
    used is forgotten.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_matched(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are known; log time, since a known part is always a
        prefix.
        """
        return bisect_left(
            range(len(block_hashes)), True, key=lambda i: block_hashes[i] not in self._hashes
        )

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Learn the blocks of a prompt, or make them the most recently used."""
        for block_hash in reversed(block_hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        self._forget_oldest()

    def resize(self, max_blocks: int) -> None:
        """Bound it anew."""
        self._max_blocks = max_blocks
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)


class _Replica:
    """What is believed of one replica."""

    def __init__(self, name: str) -> None:
        self.name_crc = crc32(name.encode())
        self.index = PrefixIndex(MAX_BLOCKS_UNREPORTED)
        self.tokens_by_request: dict[str, int] = {}
        self.num_own_tokens = 0
        self.num_foreign_tokens = 0
        self.report: ReplicaReport | None = None

    @property
    def outstanding(self) -> int:
        """Tokens of the requests it has."""
        return self.num_own_tokens + self.num_foreign_tokens


class ReplicaChooser:
    """Chooses among the replicas of one pool for one router.

    Rule: of the replicas whose outstanding tokens are at most `max(balance_factor * least, least +
    slack)`, the one with the longest known prefix; of equals the one with the fewest outstanding
    tokens. The slack is `slack_tokens`, or what the replica's cache saves of this prompt if that is
    more: waiting for so many tokens is no worse than computing them. Nothing known is the shortest
    prefix of all, so then tokens decide alone.

    Args:
        balance_factor: >= 1.
        slack_tokens: so much imbalance is never too much: the work of a chunk or so.
        block_size: tokens that a block hash stands for.
    """

    def __init__(self, balance_factor: float, slack_tokens: int, block_size: int) -> None:
        self._balance_factor = balance_factor
        self._slack_tokens = slack_tokens
        self._block_size = block_size
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, _Replica] = {}  # by the key of a sending
        self._tried: OrderedDict[str, set[str]] = OrderedDict()

    def set_replicas(self, names: Iterable[str]) -> None:
        """These replicas exist and no others. One that comes back comes with nothing known."""
        self._replicas = {name: self._replicas.get(name) or _Replica(name) for name in names}

    def report(self, name: str, report: ReplicaReport) -> None:
        """Take in what a replica says. What it has beyond what came from here, others sent it
        (a report is some time old, so this is an estimate). The same report again says nothing.
        """
        replica = self._replicas.get(name)
        if replica is None or replica.report == report:
            return
        replica.report = report
        replica.num_foreign_tokens = max(0, report.outstanding_tokens - replica.num_own_tokens)
        replica.index.resize(report.num_blocks)

    def forget_cache(self, name: str) -> None:
        """Expect nothing of a replica's cache: it may have been lost."""
        if name in self._replicas:
            self._replicas[name].index = PrefixIndex(MAX_BLOCKS_UNREPORTED)

    def num_matched(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that a replica is thought to hold."""
        return self._replicas[name].index.num_matched(block_hashes)

    def num_outstanding(self, name: str) -> int:
        """Tokens of the requests that a replica is thought to have."""
        return self._replicas[name].outstanding

    def find_order(self, request: GenerateRequest) -> list[str]:
        """All replicas, best first. A replica that this request was sent to before, and did not
        serve it, comes after all others.
        """
        if not self._replicas:
            return []
        tried = self._tried.get(request.request_id, set())
        hashes = request.block_hashes
        if not hashes:
            return self._find_order_by_tokens(tried)
        loads = {name: replica.outstanding for name, replica in self._replicas.items()}
        least = min([load for name, load in loads.items() if name not in tried], default=0)
        # So that several routers, none of which knows anything yet, choose alike.
        taste = hashes[0]
        bound = max(self._balance_factor * least, least + self._slack_tokens)
        ranks: list[tuple[bool, bool, int, int, int, str]] = []
        for name, replica in self._replicas.items():
            outstanding = loads[name]
            num_matched = replica.index.num_matched(hashes)
            is_over = outstanding > bound and outstanding > least + num_matched * self._block_size
            rank = 0 if is_over else -num_matched
            tie = crc32(taste, replica.name_crc)
            ranks.append((name in tried, is_over, rank, outstanding, tie, name))
        return [entry[-1] for entry in sorted(ranks)]

    def _find_order_by_tokens(self, tried: Container[str]) -> list[str]:
        """The rule where no prefix is known: whoever is over the bound has more tokens anyway."""
        ranks = [
            (name in tried, each.num_own_tokens + each.num_foreign_tokens, each.name_crc, name)
            for name, each in self._replicas.items()
        ]
        ranks.sort()
        return [rank[-1] for rank in ranks]

    def begin(self, name: str, key: str, request: GenerateRequest) -> None:
        """A request goes to a replica; if it was counted elsewhere under this key, it moves.

        Args:
            name: of the replica.
            key: of this sending; a retry has another.
            request: what is sent.
        """
        self.end(key)
        replica = self._replicas.get(name)
        if replica is None:
            return
        num_cached = replica.index.num_matched(request.block_hashes) * self._block_size
        num_tokens = count_tokens(request, num_cached)
        replica.tokens_by_request[key] = num_tokens
        replica.num_own_tokens += num_tokens
        self._replica_of[key] = replica
        replica.index.touch(request.block_hashes)

    def confirm(self, name: str, request: GenerateRequest) -> None:
        """The replica has accepted the request; if it comes again, it was not served there."""
        self._tried.setdefault(request.request_id, set()).add(name)
        self._tried.move_to_end(request.request_id)
        while len(self._tried) > MAX_TRIED:
            self._tried.popitem(last=False)

    def end(self, key: str) -> None:
        """A sending has ended, whichever way; an unknown one is no matter."""
        replica = self._replica_of.pop(key, None)
        if replica is not None:
            replica.num_own_tokens -= replica.tokens_by_request.pop(key)
