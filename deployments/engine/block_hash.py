"""Content hashes of KV blocks, chained so that equal hashes mean equal prefixes under one salt.

A block's hash covers its parent's hash and its own token ids; the first parent is made of the salt.
So a block is found again only behind the same prefix, and never by a request with another salt.
SHA-256 (FIPS 180-4) keeps a client from forging a collision with another client's prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_DOMAIN = b"chunkserve.block.v1"


def root_hash(cache_salt: str) -> bytes:
    """The parent of first blocks under this salt; tagged, so no salt can imitate another field."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(_DOMAIN + len(salt).to_bytes(8, "little") + salt).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_block_hashes(
    block_hashes: list[bytes],
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    cache_salt: str,
) -> None:
    """Append to `block_hashes` until it covers the first `num_blocks` full blocks of
    `token_ids`."""
    while len(block_hashes) < num_blocks:
        start = len(block_hashes) * block_size
        parent = block_hashes[-1] if block_hashes else root_hash(cache_salt)
        block_hashes.append(hash_block(parent, token_ids[start : start + block_size]))
