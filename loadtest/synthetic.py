"""Traces that no one recorded: short and long requests mixed, in bursts, with shared prefixes and
priorities.

Owns what a mix is; the same mix and seed give the same requests on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.arrivals import arriving_at
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, TraceRequest


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Tokens from `least` to `greatest`, spread evenly over magnitudes: as many requests between
    100 and 200 as between 1000 and 2000.
    """

    least: int
    greatest: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.greatest:
            raise TraceError(
                f"no lengths from {self.least} to {self.greatest}: give 1 <= least <= greatest"
            )

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """From `64-512`, or `128` for that length alone.

        Raises:
            TraceError: it is neither.
        """
        least, dash, greatest = text.partition("-")
        try:
            return cls(int(least), int(greatest if dash else least))
        except ValueError as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"no lengths {text!r}: give one, or two as in 64-512") from error

    def draw(self, chance: random.Random) -> int:
        """One of these lengths."""
        # The upper end is one more, so that it is as likely as its neighbours.
        log_length = chance.uniform(math.log(self.least), math.log(self.greatest + 1))
        return min(self.greatest, int(math.exp(log_length)))


@dataclass(frozen=True, slots=True)
class Mix:
    """What a synthetic trace is made of.

    Args:
        short: tokens of a short prompt, beside its shared beginning if it has one.
        long: of a long one.
        long_share: of all requests.
        output: tokens of an answer.
        num_prefixes: different beginnings, such as system prompts, that requests share; request by
            request one of them is drawn.
        prefix_blocks: blocks of 512 tokens that each of them has.
        prefix_share: of all requests, those that begin with one.
        priorities: shares of the requests by priority, in any unit.
    """

    short: LengthRange = LengthRange(64, 512)
    long: LengthRange = LengthRange(2048, 8192)
    long_share: float = 0.1
    output: LengthRange = LengthRange(16, 256)
    num_prefixes: int = 0
    prefix_blocks: int = 1
    prefix_share: float = 1.0
    priorities: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})

    def __post_init__(self) -> None:
        for name, share in (("long share", self.long_share), ("prefix share", self.prefix_share)):
            if not 0.0 <= share <= 1.0:
                raise TraceError(f"the {name} must be within 0 and 1, not {share:g}")
        if self.num_prefixes < 0 or self.prefix_blocks < 1:
            raise TraceError("give 0 or more prefixes of 1 or more blocks")
        weights = self.priorities.values()
        if not weights or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise TraceError("priorities need weights of 0 or more, and one above 0, as in 0:1,1:4")
        if min(self.priorities) < 0:
            raise TraceError("a priority is a whole number of 0 or more")


def parse_priorities(text: str) -> dict[int, float]:
    """From `0:1,1:4`: one request of priority 0 to four of priority 1.

    Raises:
        TraceError: it is not of that form.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(priority): float(weight) for priority, weight in pairs}
    except ValueError as error:
        raise TraceError(
            f"no priorities {text!r}: give PRIORITY:WEIGHT,... as in 0:1,1:4"
        ) from error


def synthesize(
    mix: Mix, num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """Requests of a mix, at random times of a steady rate.

    Args:
        mix: what they are.
        num_requests: how many.
        rate: requests per second.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson.
        seed: of lengths and gaps.

    Raises:
        TraceError: fewer than one request.
        SendTimesError: a rate or burstiness that is not above 0.
    """
    if num_requests < 1:
        raise TraceError(f"a trace has at least one request, not {num_requests}")
    chance = random.Random(seed)
    blocks = _Blocks(mix)
    requests = [_draw(mix, blocks, chance) for _ in range(num_requests)]
    return arriving_at(requests, rate, burstiness, seed)


class _Blocks:
    """Hash ids: those of the prefixes first, then one for each block that nobody shares."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._next_id = mix.num_prefixes * mix.prefix_blocks

    def ids_of(self, prefix: int | None, input_length: int) -> tuple[int, ...]:
        """One for each block of a prompt, as Mooncake's traces have them."""
        size = self._mix.prefix_blocks
        ids = [] if prefix is None else list(range(prefix * size, (prefix + 1) * size))
        num_own = math.ceil(input_length / HASH_BLOCK_TOKENS) - len(ids)
        ids += range(self._next_id, self._next_id + num_own)
        self._next_id += num_own
        return tuple(ids)


def _draw(mix: Mix, blocks: _Blocks, chance: random.Random) -> TraceRequest:
    lengths = mix.long if chance.random() < mix.long_share else mix.short
    input_length = lengths.draw(chance)
    output_length = mix.output.draw(chance)
    priority = chance.choices(list(mix.priorities), list(mix.priorities.values()))[0]
    hash_ids: tuple[int, ...] = ()
    if mix.num_prefixes:
        prefix = None
        if chance.random() < mix.prefix_share:
            prefix = chance.randrange(mix.num_prefixes)
            input_length += mix.prefix_blocks * HASH_BLOCK_TOKENS
        hash_ids = blocks.ids_of(prefix, input_length)
    return TraceRequest(0.0, input_length, output_length, hash_ids, priority)
