"""Owns the KV blocks of one replica: who holds them, which are free, which still carry reusable
content.

Does not know requests, tokens or tensors; `KVCacheManager` does the first two, `PagedKVCache` the
third.

    free queue (LRU):  head -> [5][7][3][9] <- tail
                       taken first    freed last

A freed block keeps its hash until it is taken again, so that a prefix can be revived; a block
without a hash is worth nothing and goes to the head.
Block 0 is the null block: padding may write there, nobody is ever given it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for."""


class IntegrityError(AssertionError):
    """A fault of the engine itself: its records contradict each other."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1 with reference counts, an LRU free queue and an index by
    content."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # An ordered dict, not a deque: a revived block leaves from the middle in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_usable = num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, those that still carry content included."""
        return len(self._free)

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self._num_usable

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        """How many requests hold this block."""
        return self._ref_counts[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free; None if there is none."""
        return self._block_of.get(block_hash)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are in the free queue, so that sharing them takes them from
        it."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def take(self, num_blocks: int) -> list[int]:
        """Hand out the least recently freed blocks, dropping what they cached.

        Raises:
            OutOfBlocks: fewer than `num_blocks` are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        self.unpublish(taken)
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Let one more request hold each of these blocks; a free one is revived with its
        content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder lets go of these blocks, given in the order of its table.

        They are freed last to first: a prefix is of use to more requests than what follows it.
        """
        free, ref_counts, hash_of = self._free, self._ref_counts, self._hash_of
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] - 1
            if count < 0:
                raise IntegrityError(f"block {block_id} was released more often than taken")
            ref_counts[block_id] = count
            if count == 0:
                free[block_id] = None
                if hash_of[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let others find this block by its content. Call only after the step that filled it has
        run: a step that failed must not leave a hash behind for content that was never written.

        Of two blocks with the same content the first stays the one that is found.
        """
        if self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Let nobody find these blocks by their content any more."""
        for block_id in block_ids:
            block_hash = self._hash_of[block_id]
            if block_hash is not None:
                del self._block_of[block_hash]
                self._hash_of[block_id] = None

    def check_integrity(self) -> None:
        """Compare the records with each other; linear in the pool, for tests and for an idle
        engine.

        Raises:
            IntegrityError: free queue, reference counts and index contradict each other.
        """
        for block_id in range(1, len(self._ref_counts)):
            if (self._ref_counts[block_id] == 0) != (block_id in self._free):
                raise IntegrityError(
                    f"block {block_id}: count {self._ref_counts[block_id]} against free queue"
                )
        if NULL_BLOCK in self._free or self._ref_counts[NULL_BLOCK] or self._hash_of[NULL_BLOCK]:
            raise IntegrityError("the null block is in use")
        for block_hash, block_id in self._block_of.items():
            if self._hash_of[block_id] != block_hash:
                raise IntegrityError(f"block {block_id} is indexed under a hash it does not carry")
        if sum(block_hash is not None for block_hash in self._hash_of) != len(self._block_of):
            raise IntegrityError("a block carries a hash that the index does not know")
