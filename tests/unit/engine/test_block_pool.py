"""Which block is taken when: exact ids, because an eviction order that is nearly right looks
right.
"""

from __future__ import annotations

import pytest

from deployments.engine.block_pool import BlockPool, IntegrityError, OutOfBlocks


def content(number: int) -> bytes:
    return bytes([number])


def make_cached_pool(num_blocks: int) -> BlockPool:
    """A pool whose usable blocks 1, 2, ... all carry content 1, 2, ... and are free, 1 freed
    first.
    """
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks - 1):
        pool.publish(block, content(block))
    for block in range(1, num_blocks):
        pool.release([block])
    return pool


def test_the_null_block_is_never_given() -> None:
    """Block 0, which padding overwrites, is handed to a request."""
    assert sorted(BlockPool(5).take(4)) == [1, 2, 3, 4]


def test_exact_eviction_order() -> None:
    """Blocks are evicted in another order than least recently freed first, a table's tail first."""
    pool = BlockPool(8)
    one, two = pool.take(3), pool.take(2)
    assert (one, two) == ([1, 2, 3], [4, 5])
    for block in (*one, *two):
        pool.publish(block, content(block))
    pool.release(two)  # freed 5, 4
    pool.release(one)  # freed 3, 2, 1
    pool.share([4])  # revived, so it moves to the end
    pool.release([4])
    # 6 and 7 never held anything and go first.
    assert pool.take(7) == [6, 7, 5, 3, 2, 1, 4]


def test_a_block_without_content_is_taken_first() -> None:
    """Reusable content is evicted while a worthless block is free."""
    pool = make_cached_pool(5)
    assert pool.take(2) == [1, 2]
    pool.release([1, 2])
    pool.check_integrity()
    assert pool.take(4) == [1, 2, 3, 4]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """The first block of a prefix goes first, so that what follows it can never be found again."""
    pool = BlockPool(4)
    table = pool.take(3)
    for block in table:
        pool.publish(block, content(block))
    pool.release(table)
    assert pool.take(3) == table[::-1]


def test_a_freed_block_can_be_revived_with_its_content() -> None:
    """A free block that is shared again stays in the free queue and is handed out to another."""
    pool = make_cached_pool(4)
    block = pool.find(content(1))
    assert block == 1
    pool.share([block])
    assert pool.num_free_blocks == 2
    assert pool.take(2) == [2, 3]
    assert pool.find(content(1)) == 1
    pool.check_integrity()


def test_taking_too_many_takes_nothing() -> None:
    """A request that does not fit takes what is there, or evicts content, and then fails."""
    pool = make_cached_pool(4)
    with pytest.raises(OutOfBlocks):
        pool.take(4)
    assert pool.num_free_blocks == 3
    assert pool.num_cached_blocks == 3
    pool.check_integrity()


def test_a_taken_block_is_no_longer_found() -> None:
    """A block that is being overwritten is still found by its old content."""
    pool = make_cached_pool(3)
    pool.take(1)
    assert pool.find(content(1)) is None
    assert pool.find(content(2)) == 2


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    """Publishing a duplicate loses the first block's entry, or makes the second's eviction remove
    it.
    """
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first, content(7))
    pool.publish(second, content(7))
    assert pool.find(content(7)) == first
    pool.release([second])
    assert pool.take(1) == [second]
    assert pool.find(content(7)) == first
    pool.check_integrity()


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    """A block is freed under a request that still reads it."""
    pool = BlockPool(2)
    block = pool.take(1)
    pool.share(block)
    pool.release(block)
    assert pool.num_free_blocks == 0
    pool.release(block)
    assert pool.num_free_blocks == 1


def test_releasing_twice_is_a_fault() -> None:
    """A block freed twice goes unnoticed and later has two owners."""
    pool = BlockPool(2)
    block = pool.take(1)
    pool.release(block)
    with pytest.raises(IntegrityError):
        pool.release(block)


def test_unpublished_blocks_are_not_found_and_go_first() -> None:
    """Content that was found to be unusable is served to others."""
    pool = make_cached_pool(4)
    pool.share([3])
    pool.unpublish([3])
    assert pool.find(content(3)) is None
    pool.release([3])
    pool.check_integrity()
    assert pool.take(1) == [3]


def test_the_integrity_check_sees_contradictions() -> None:
    """The check passes whatever the records say."""
    pool = make_cached_pool(4)
    pool._hash_of[2] = None
    with pytest.raises(IntegrityError):
        pool.check_integrity()
    pool = make_cached_pool(4)
    pool._ref_counts[2] = 1
    with pytest.raises(IntegrityError):
        pool.check_integrity()
    pool = BlockPool(4)
    pool._ref_counts[0] = 1
    with pytest.raises(IntegrityError):
        pool.check_integrity()
