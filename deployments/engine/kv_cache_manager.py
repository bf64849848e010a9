"""Which blocks each request holds, and which it finds already filled.

Owns the block tables and the rule of prefix hits. Does not know tensors, nor who runs when.

    block_table  [ 4 ][ 9 ][ 2 ]         block i holds tokens [i * block_size, (i + 1) * block_size)
                  hit  hit  own          hits are shared and never written; only own blocks are
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from deployments.engine.block_hash import extend_block_hashes
from deployments.engine.block_pool import NULL_BLOCK, BlockPool, IntegrityError
from deployments.engine.request import Request


class KVCacheManager:
    """Block tables over one pool.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        enable_prefix_caching: whether blocks are published and looked up by content.
    """

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def block_tables(self) -> Mapping[str, list[int]]:
        """All of them, by request id; see `block_table`."""
        return self._tables

    def block_table(self, request: Request) -> list[int]:
        """The request's blocks in token order: a live view that only grows while it runs."""
        return self._tables[request.request_id]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-num_tokens // self._block_size)

    def hash_prompt(self, request: Request) -> None:
        """Compute the hashes of its full blocks once, when it arrives."""
        if self._caches_prefixes:
            self._hash_up_to(request, request.num_tokens // self._block_size)

    def find_cached_prefix(self, request: Request) -> list[int]:
        """The longest run of filled blocks that the request's tokens begin with.

        At least its last token is left to compute, since sampling needs that token's hidden state:
        a prompt that is cached whole computes its last block again, in a block of its own, because
        shared ones are not written.
        """
        if not request.reads_prefix_cache:
            return []
        num_blocks = (request.num_tokens - 1) // self._block_size
        hits: list[int] = []
        for block_hash in request.block_hashes[:num_blocks]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def admit(self, request: Request, hits: list[int]) -> None:
        """Give it blocks for all its known tokens, so that no chunk of it can fail half way.

        Raises:
            OutOfBlocks: `num_blocks_short` is positive; nothing was taken.
        """
        # Share first: a free hit must not be handed out again as a new block.
        self._pool.share(hits)
        num_new = self.num_blocks_for(request.num_tokens) - len(hits)
        try:
            own = self._pool.take(num_new)
        except Exception:
            self._pool.release(hits)
            raise
        self._tables[request.request_id] = [*hits, *own]
        request.num_computed_tokens = len(hits) * self._block_size

    def find_blockless(self, decodes: Iterable[Request]) -> list[Request]:
        """Those whose last known token has no block yet, in their order."""
        size = self._block_size
        # Only a token that begins a block can lack one, and most do not.
        return [
            request
            for request in decodes
            if request.num_computed_tokens % size == 0 and self.needs_block(request)
        ]

    def needs_block(self, request: Request) -> bool:
        """Whether its last known token has no block yet."""
        return len(request.token_ids) > len(self._tables[request.request_id]) * self._block_size

    def append_block(self, request: Request) -> None:
        """Give it one more block.

        Raises:
            OutOfBlocks: none is free.
        """
        self._tables[request.request_id] += self._pool.take(1)

    def publish(self, request: Request, num_computed_before: int) -> None:
        """Let others find the blocks that the step just run has filled, from `num_computed_before`
        on."""
        if not self._caches_prefixes:
            return
        first = num_computed_before // self._block_size
        last = request.num_computed_tokens // self._block_size
        if first == last:
            return
        self._hash_up_to(request, last)
        table = self._tables[request.request_id]
        for index in range(first, last):
            self._pool.publish(table[index], request.block_hashes[index])

    def unpublish(self, request: Request) -> None:
        """Let nobody find its blocks by their content any more; who shares them keeps them."""
        self._pool.unpublish(self._tables[request.request_id])

    def free(self, request: Request) -> None:
        """Let go of all its blocks; what they carry stays findable until they are taken again."""
        self._pool.release(self._tables.pop(request.request_id))

    def find_victims(
        self, candidates: Iterable[Request], num_blocks: int, keep: Container[int]
    ) -> list[Request] | None:
        """The first of `candidates`, in their order, that together free `num_blocks` blocks outside
        `keep`.

        A block that several of them share is freed by the last of them. None if all of them do not
        suffice.
        """
        releases: Counter[int] = Counter()
        num_freed = 0
        victims: list[Request] = []
        for request in candidates:
            if num_freed >= num_blocks:
                break
            victims.append(request)
            for block_id in self._tables[request.request_id]:
                releases[block_id] += 1
                if releases[block_id] == self._pool.ref_count(block_id) and block_id not in keep:
                    num_freed += 1
        return victims if num_freed >= num_blocks else None

    def num_blocks_short(self, request: Request, hits: list[int]) -> int:
        """How many free blocks are missing to admit it; 0 or less if none is."""
        num_new = self.num_blocks_for(request.num_tokens) - len(hits)
        return num_new + self._pool.num_free_among(hits) - self._pool.num_free_blocks

    def _hash_up_to(self, request: Request, num_blocks: int) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            num_blocks,
            self._block_size,
            request.cache_salt,
        )

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Compare tables, counts and the requests that should hold them.

        Raises:
            IntegrityError: a table without its request or the reverse, a wrong length, a block
                counted wrongly, or a block about to be written that somebody else holds.
        """
        self._pool.check_integrity()
        requests = {request.request_id: request for request in running}
        if requests.keys() != self._tables.keys():
            raise IntegrityError(f"tables of {sorted(self._tables)} for running {sorted(requests)}")
        holders = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(1, self._pool.num_usable_blocks + 1):
            if holders[block_id] != self._pool.ref_count(block_id):
                raise IntegrityError(
                    f"block {block_id}: {holders[block_id]} holders, another count"
                )
        for request_id, table in self._tables.items():
            self._check_table(requests[request_id], table)

    def _check_table(self, request: Request, table: list[int]) -> None:
        if NULL_BLOCK in table or len(set(table)) != len(table):
            raise IntegrityError(f"{request.request_id}: null or repeated block in {table}")
        if len(table) < self.num_blocks_for(request.num_computed_tokens):
            raise IntegrityError(
                f"{request.request_id}: {len(table)} blocks for {request.num_computed_tokens}"
            )
        for block_id in table[request.num_computed_tokens // self._block_size :]:
            if self._pool.ref_count(block_id) != 1:
                raise IntegrityError(
                    f"{request.request_id}: would write block {block_id}, which others hold"
                )
