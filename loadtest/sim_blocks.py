"""KV blocks that nobody shares and nobody finds by their content: the pool of a replica without a
prefix cache.

Owns what is left of `BlockPool` then: which blocks are free. Any of them is as good as another, so
the one freed last is taken next, which keeps a fleet's records in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deployments.engine.block_pool import NULL_BLOCK, BlockPool, IntegrityError, OutOfBlocks


class UnsharedBlocks(BlockPool):
    """Blocks 1 .. num_blocks - 1, each of one holder or free. Only for a `KVCacheManager` that does
    not cache prefixes.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(0)
        self._num_usable = num_blocks - 1
        self._free_ids = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free_blocks(self) -> int:
        """See BlockPool."""
        return len(self._free_ids)

    def ref_count(self, block_id: int) -> int:
        """See BlockPool; every block that is asked for is held, by one."""
        return 1

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """See BlockPool."""
        return 0

    def take(self, num_blocks: int) -> list[int]:
        """See BlockPool."""
        free = self._free_ids
        if num_blocks > len(free):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(free)} free")
        first = len(free) - num_blocks
        taken = free[first:]
        del free[first:]
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """See BlockPool; there is nothing that two could share."""
        if block_ids:
            raise IntegrityError("blocks of a pool without a prefix cache cannot be shared")

    def release(self, block_ids: Sequence[int]) -> None:
        """See BlockPool."""
        self._free_ids += block_ids

    def check_integrity(self) -> None:
        """See BlockPool."""
        if len(set(self._free_ids)) != len(self._free_ids):
            raise IntegrityError("a block is free twice")
