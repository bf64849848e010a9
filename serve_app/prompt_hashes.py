"""The block hashes of a prompt, as an ingress sends them along for whoever chooses a replica.

They are the engine's own chained hashes, cut to a few bytes: a collision sends a request to a
replica that does not hold its prefix, nothing more.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from deployments.engine.block_hash import extend_block_hashes
from deployments.protocol import GenerateRequest

NUM_HASH_BYTES = 8
MAX_INLINE_TOKENS = 8192
"""A longer prompt is hashed off the event loop: a millisecond or more."""


def hash_prompt(request: GenerateRequest, block_size: int) -> tuple[bytes, ...]:
    """One short hash for each full block of the prompt but a last one that ends it: of a prompt the
    last token is always computed, so that block is never reused whole.
    """
    num_blocks = (len(request.prompt_token_ids) - 1) // block_size
    block_hashes: list[bytes] = []
    extend_block_hashes(
        block_hashes, request.prompt_token_ids, num_blocks, block_size, request.cache_salt
    )
    return tuple(block_hash[:NUM_HASH_BYTES] for block_hash in block_hashes)


async def with_block_hashes(request: GenerateRequest, block_size: int) -> GenerateRequest:
    """The request with the hashes of its prompt."""
    if len(request.prompt_token_ids) <= MAX_INLINE_TOKENS:
        return replace(request, block_hashes=hash_prompt(request, block_size))
    block_hashes = await asyncio.to_thread(hash_prompt, request, block_size)
    return replace(request, block_hashes=block_hashes)
