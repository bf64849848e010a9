"""Block tables and prefix hits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doubles import make_request

from deployments.engine.block_pool import BlockPool, IntegrityError, OutOfBlocks
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.request import Request

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 9, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_caching)


def arrive(kv: KVCacheManager, prompt: Sequence[int], **fields: str) -> Request:
    incoming = make_request(prompt, **fields)
    request = Request.arrive(incoming, now=0.0, index=0, seed=0, max_num_tokens=1000)
    kv.hash_prompt(request)
    return request


def run_prompt(kv: KVCacheManager, prompt: Sequence[int], **fields: str) -> Request:
    """A request whose whole prompt has been computed and published."""
    request = arrive(kv, prompt, **fields)
    kv.admit(request, kv.find_cached_prefix(request))
    before = request.num_computed_tokens
    request.num_computed_tokens = request.num_tokens
    kv.publish(request, before)
    return request


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_as_many_blocks_as_tokens_fill_or_begin(num_tokens: int) -> None:
    """B37: a prompt that ends at a block's end gets a block too many or too few."""
    kv = make_kv()
    request = run_prompt(kv, range(1, num_tokens + 1))
    assert len(kv.block_table(request)) == -(-num_tokens // BLOCK_SIZE)
    assert not kv.needs_block(request)
    request.take_token(1, 0.0, ())
    assert kv.needs_block(request) == (num_tokens % BLOCK_SIZE == 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_hits_never_include_the_last_token(num_tokens: int, num_hits: int) -> None:
    """A prompt that is cached whole has no token left whose logits could be sampled."""
    kv = make_kv()
    prompt = range(1, num_tokens + 1)
    first = run_prompt(kv, prompt)
    again = arrive(kv, prompt)
    hits = kv.find_cached_prefix(again)
    assert hits == kv.block_table(first)[:num_hits]
    kv.admit(again, hits)
    assert again.num_computed_tokens == num_hits * BLOCK_SIZE < again.num_tokens


def test_a_hit_stops_at_the_first_block_that_differs() -> None:
    """B55: a block is found behind a first block that differs."""
    kv = make_kv()
    run_prompt(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert kv.find_cached_prefix(arrive(kv, [9, 2, 3, 4, 5, 6, 7, 8, 9])) == []
    assert len(kv.find_cached_prefix(arrive(kv, [1, 2, 3, 4, 5, 6, 7, 9, 9]))) == 1


def test_salts_never_share() -> None:
    """B55, B56: a tenant finds what another tenant's prompt left."""
    kv = make_kv()
    run_prompt(kv, range(1, 10), cache_salt="a")
    assert kv.find_cached_prefix(arrive(kv, range(1, 10), cache_salt="b")) == []
    assert kv.find_cached_prefix(arrive(kv, range(1, 10))) == []
    assert len(kv.find_cached_prefix(arrive(kv, range(1, 10), cache_salt="a"))) == 2


def test_with_caching_off_nothing_is_found() -> None:
    """enable_prefix_caching: false is ignored."""
    kv = make_kv(enable_prefix_caching=False)
    run_prompt(kv, range(1, 10))
    assert kv.find_cached_prefix(arrive(kv, range(1, 10))) == []


def test_only_full_blocks_are_published() -> None:
    """A block is found before all its tokens are computed."""
    kv = make_kv()
    request = arrive(kv, range(1, 10))
    kv.admit(request, [])
    request.num_computed_tokens = 7
    kv.publish(request, 0)
    assert len(kv.find_cached_prefix(arrive(kv, range(1, 10)))) == 1
    request.num_computed_tokens = 8
    kv.publish(request, 7)
    assert len(kv.find_cached_prefix(arrive(kv, range(1, 10)))) == 2


def test_a_hit_is_pinned_before_new_blocks_are_taken() -> None:
    """B40: a free hit is handed out again as one of the request's own blocks."""
    kv = make_kv(num_blocks=4)
    kv.free(run_prompt(kv, range(1, 9)))
    again = arrive(kv, range(1, 10))
    hits = kv.find_cached_prefix(again)
    assert len(hits) == 2
    assert kv.num_blocks_short(again, hits) == 0
    kv.admit(again, hits)
    assert len(set(kv.block_table(again))) == 3
    kv.check_integrity([again])


def test_an_evicted_prefix_is_not_found() -> None:
    """B40: blocks that another request took since are still counted as cached."""
    kv = make_kv(num_blocks=4)
    kv.free(run_prompt(kv, range(1, 9)))
    other = run_prompt(kv, range(101, 110))
    kv.free(other)
    assert kv.find_cached_prefix(arrive(kv, range(1, 10))) == []


def test_an_admission_that_fails_takes_nothing() -> None:
    """A request that does not fit keeps its hits pinned for ever."""
    kv = make_kv(num_blocks=5)
    kv.free(run_prompt(kv, range(1, 6)))
    large = arrive(kv, range(1, 22))
    with pytest.raises(OutOfBlocks):
        kv.admit(large, kv.find_cached_prefix(large))
    assert kv.num_free_blocks == kv.num_usable_blocks
    kv.check_integrity([])


def test_victims_are_as_few_as_free_enough() -> None:
    """More requests are preempted than needed, or one whose blocks are all shared and free
    nothing.
    """
    kv = make_kv()
    one = run_prompt(kv, range(1, 10))
    sharer = run_prompt(kv, range(1, 10))  # shares two of its three blocks
    own = run_prompt(kv, range(101, 106))
    candidates = [sharer, one, own]
    assert kv.find_victims(candidates, 1, set()) == [sharer]
    assert kv.find_victims(candidates, 2, set()) == [sharer, one]
    assert kv.find_victims([own], 3, set()) is None
    assert kv.find_victims(candidates, 0, set()) == []
    kept = set(kv.block_table(one))
    assert kv.find_victims(candidates, 2, kept) == [sharer, one, own]


def test_blocks_of_an_unusable_row_are_not_found() -> None:
    """A prompt whose keys are not numbers fails every later request that begins with it (B32)."""
    kv = make_kv()
    request = run_prompt(kv, range(1, 10))
    kv.unpublish(request)
    kv.free(request)
    assert kv.find_cached_prefix(arrive(kv, range(1, 10))) == []
    kv.check_integrity([])


def test_the_integrity_check_sees_contradictions() -> None:
    """The check passes for a shared block about to be written, or a table nobody should have."""
    kv = make_kv()
    first = run_prompt(kv, range(1, 10))
    second = run_prompt(kv, range(1, 10))
    kv.check_integrity([first, second])
    with pytest.raises(IntegrityError):
        kv.check_integrity([first])
    second.num_computed_tokens = 7
    with pytest.raises(IntegrityError):
        kv.check_integrity([first, second])
