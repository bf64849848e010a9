"""The hashes an ingress sends along for the choice of a replica, and the log of many failures."""

from __future__ import annotations

import asyncio
import logging

import pytest

from deployments.engine.block_hash import extend_block_hashes
from deployments.protocol import GenerateRequest, SamplingParams
from serve_app.prompt_hashes import MAX_INLINE_TOKENS, NUM_HASH_BYTES, with_block_hashes
from serve_app.quiet_log import QuietLog


def hashes_of(num_tokens: int, block_size: int, salt: str = "") -> tuple[bytes, ...]:
    prompt = tuple(range(num_tokens))
    request = GenerateRequest("a", prompt, SamplingParams(), cache_salt=salt)
    return asyncio.run(with_block_hashes(request, block_size)).block_hashes


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_only_blocks_that_can_be_reused_have_a_hash(num_tokens: int, num_blocks: int) -> None:
    """The block of the last token is matched, though its token is always computed again."""
    assert len(hashes_of(num_tokens, 4)) == num_blocks


def test_they_are_those_of_the_engine() -> None:
    """Router and cache disagree about what a prefix is, so the router sends chats astray."""
    full: list[bytes] = []
    extend_block_hashes(full, range(64), 3, 16, "tenant")
    assert hashes_of(64, 16, "tenant") == tuple(one[:NUM_HASH_BYTES] for one in full)
    assert not set(hashes_of(64, 16, "tenant")) & set(hashes_of(64, 16, "other"))


def test_a_long_prompt_has_the_same_hashes() -> None:
    """Off the event loop something else is computed than on it."""
    long = hashes_of(MAX_INLINE_TOKENS + 1, 16)
    assert len(long) == MAX_INLINE_TOKENS // 16
    assert long[:10] == hashes_of(161, 16)


def test_a_storm_of_failures_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Every request of a dead pool logs, and the cause drowns (B68)."""
    now = [0.0]
    log = QuietLog(logging.getLogger("quiet"), max_lines=3, period_s=1.0, now=lambda: now[0])
    for number in range(100):
        log.warning(f"request {number}")
    now[0] = 1.5
    log.warning("request 100")
    lines = [record.message for record in caplog.records]
    assert lines[:3] == ["request 0", "request 1", "request 2"]
    assert lines[3:] == ["request 100 (and 97 more lines like it)"]
