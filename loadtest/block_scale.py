"""Longer or shorter requests that share the same part of their prompts as before.

Blocks scale with the lengths, and keep their ids. If they stayed 512 tokens long, a shorter trace
would share less: at a twentieth, a block stands for twenty of the old ones, and is shared only
where all of them were.

    512  │ 46 │ 47 │ 2353 │ 235…       the same ids in blocks of 26 tokens
     26  │46│47│2353│235…
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from loadtest.arrivals import check_factor
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """Requests, and the tokens that each of their hash ids stands for."""

    requests: Collection[TraceRequest]
    hash_block_tokens: int


def scale_with_blocks(
    requests: Sequence[TraceRequest], factor: float, hash_block_tokens: int = HASH_BLOCK_TOKENS
) -> ScaledTrace:
    """Multiply the lengths of prompts, answers and blocks; each is of one token at least.

    Args:
        requests: any; those without hash ids share nothing, before and after.
        factor: of all lengths.
        hash_block_tokens: tokens that a hash id stands for before.

    Raises:
        TraceError: a factor that is not above 0, or of a million and more.
    """
    check_factor("length scale", factor)
    block = max(1, round(hash_block_tokens * factor))

    def scaled(request: TraceRequest) -> TraceRequest:
        input_length = max(1, round(request.input_length * factor))
        if request.hash_ids:
            num_full, rest = divmod(request.input_length - 1, hash_block_tokens)
            # A token at least and a block at most: each id still has its block.
            last = min(block, max(1, round((rest + 1) * factor)))
            input_length = num_full * block + last
        output_length = max(1, round(request.output_length * factor))
        return replace(request, input_length=input_length, output_length=output_length)

    return ScaledTrace([scaled(request) for request in requests], block)
