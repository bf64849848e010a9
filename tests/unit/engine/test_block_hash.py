"""Block hashes mean whole prefixes under one salt (public faults B55, B56)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.block_hash import extend_block_hashes, hash_block, root_hash


def hashes(tokens: list[int], block_size: int = 2, salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_block_hashes(found, tokens, len(tokens) // block_size, block_size, salt)
    return found


def test_a_block_behind_another_first_block_has_another_hash() -> None:
    """B55: the second blocks are equal and the first differ, and KV of the other prompt is used."""
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 2, 3, 4])[1]


def test_equal_prefixes_have_equal_hashes() -> None:
    """What follows a block, or a partial block, changes its hash, so that nothing is ever
    shared.
    """
    assert hashes([1, 2, 3, 4, 5, 6])[:2] == hashes([1, 2, 3, 4, 7]) == hashes([1, 2, 3, 4])


@given(st.text(max_size=4), st.text(max_size=4))
def test_salts_never_share(one: str, other: str) -> None:
    """B55, B56: two tenants with different salts find each other's blocks."""
    assert (hashes([1, 2], salt=one) == hashes([1, 2], salt=other)) == (one == other)


def test_a_salt_cannot_imitate_a_block() -> None:
    """B55: untagged fields let a salt and a token sequence make the same hash."""
    salt = "\x01" + "\x00" * 7
    assert root_hash(salt) != hash_block(root_hash(""), [1])
    assert hash_block(root_hash("a"), [1]) != root_hash("a" + salt)


def test_a_lone_surrogate_in_a_salt_is_no_error() -> None:
    """A salt that is not valid UTF-8 ends the engine."""
    assert root_hash("\ud800") != root_hash("")


def test_token_order_and_cut_matter() -> None:
    """Tokens that concatenate or swap to the same bytes collide."""
    root = root_hash("")
    assert len({hash_block(root, ids) for ids in ([1, 2], [2, 1], [12], [1, 2, 0], [258])}) == 5


def test_hashes_are_extended_not_recomputed() -> None:
    """A second call changes what was there, or stops at another block than asked."""
    known = hashes([1, 2, 3, 4])
    first = list(known)
    extend_block_hashes(known, [1, 2, 3, 4, 5, 6, 7, 8], 3, 2, "")
    assert known[:2] == first and len(known) == 3
    assert known == hashes([1, 2, 3, 4, 5, 6])
