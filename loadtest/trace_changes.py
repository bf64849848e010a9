"""How a recorded trace is fitted to a system: its first requests, coarse times spread, times and
lengths scaled. The flags, and their order, are the same for each command that reads a trace.

    the file ──► first so many ──► ticks spread ──► times scaled ──► lengths and blocks scaled

Owns no arrivals: a rate that replaces the times is the command's, and `arrivals`'.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.arrivals import scale_times, spread_ticks
from loadtest.block_scale import ScaledTrace, scale_with_blocks
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, TraceRequest


@dataclass(frozen=True, slots=True)
class TraceChanges:
    """What is done to a trace; by default nothing.

    Args:
        tick_s: requests are spread over so many seconds each; None: they keep their times.
        time_scale: factor of all times.
        length_scale: factor of all prompts, answers and blocks.
        hash_block_tokens: tokens that a hash id of the file stands for.
        seed: of what is spread.

    Raises:
        TraceError: a block of no token.
    """

    tick_s: float | None = None
    time_scale: float = 1.0
    length_scale: float = 1.0
    hash_block_tokens: int = HASH_BLOCK_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hash_block_tokens < 1:
            raise TraceError("--hash-block-tokens must be at least 1")

    def apply(self, requests: Sequence[TraceRequest]) -> ScaledTrace:
        """The changed requests, by time, and the tokens that a hash id stands for now.

        Args:
            requests: by time.

        Raises:
            TraceError: a factor or a tick that is not above 0.
        """
        if self.tick_s is not None:
            requests = spread_ticks(requests, self.tick_s, self.seed)
        requests = scale_times(requests, self.time_scale)
        return scale_with_blocks(requests, self.length_scale, self.hash_block_tokens)


def first_requests(
    requests: Sequence[TraceRequest], num_prompts: int | None
) -> Sequence[TraceRequest]:
    """The first so many; None: all of them.

    Raises:
        TraceError: there are fewer.
    """
    if num_prompts is None:
        return requests
    if not 1 <= num_prompts <= len(requests):
        raise TraceError(
            f"the trace has {len(requests)} requests; give --num-prompts from 1 to that"
        )
    return requests[:num_prompts]


def add_scale_arguments(group: argparse._ArgumentGroup) -> None:
    """What `changes_of` reads, but for `--seed`, which draws more than this."""
    group.add_argument(
        "--spread-ticks",
        type=float,
        metavar="SECONDS",
        help="move each request later, by chance and so long at most: for times that a coarse "
        "clock wrote (Mooncake's ticks every 3 s)",
    )
    group.add_argument(
        "--time-scale", type=float, default=1.0, help="of a trace's times; 0.5 is twice the rate"
    )
    group.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        help="of a trace's prompts and answers; hash blocks scale too, so that as much is shared",
    )
    group.add_argument(
        "--hash-block-tokens",
        type=int,
        default=HASH_BLOCK_TOKENS,
        help="tokens that a hash id of the trace stands for (512)",
    )


def changes_of(arguments: argparse.Namespace) -> TraceChanges:
    """The changes that the flags ask for.

    Raises:
        TraceError: a block of no token.
    """
    return TraceChanges(
        tick_s=arguments.spread_ticks,
        time_scale=arguments.time_scale,
        length_scale=arguments.length_scale,
        hash_block_tokens=arguments.hash_block_tokens,
        seed=arguments.seed,
    )
