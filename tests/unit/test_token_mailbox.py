"""Parts of an answer that come by two ways, in any order."""

from __future__ import annotations

import asyncio
import random

import pytest

from deployments.protocol import FinishReason, TokenChunk, TokenLogprobs, TokenRun
from serve_app.token_mailbox import TokenMailbox, TokensLost


def chunk(first: int, count: int, finish: FinishReason | None = None) -> TokenChunk:
    """Tokens first, first+1, ...: what is read shows what is missing."""
    tokens = list(range(first, first + count))
    return TokenChunk("a", tokens, finish_reason=finish, num_preceding=first)


def run(first: int, count: int) -> TokenRun:
    return TokenRun(1, first, list(range(first, first + count)), None)


def riding() -> TokenMailbox:
    mailbox = TokenMailbox("a")
    mailbox.find_relay()
    return mailbox


def read(mailbox: TokenMailbox) -> list[TokenChunk]:
    async def all_of() -> list[TokenChunk]:
        return [part async for part in mailbox]

    return asyncio.run(asyncio.wait_for(all_of(), 10.0))


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for part in chunks for token in part.token_ids]


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_arrival_reads_the_same(seed: int) -> None:
    """The end overtakes tokens, which are lost or come after it."""
    mailbox, shuffle = riding(), random.Random(seed)
    cuts = sorted(shuffle.sample(range(1, 60), 8))
    spans = list(zip([0, *cuts], [*cuts, 60], strict=True))
    parts: list[TokenChunk | TokenRun] = [run(a, b - a) for a, b in spans[1:-1]]
    parts += [chunk(0, cuts[0]), chunk(cuts[-1], 60 - cuts[-1], FinishReason.LENGTH)]
    shuffle.shuffle(parts)
    for part in parts:
        mailbox.put_run(part) if isinstance(part, TokenRun) else mailbox.put(part)
    mailbox.end()
    chunks = read(mailbox)
    assert tokens_of(chunks) == list(range(60))
    assert [part.finish_reason for part in chunks][-1] is FinishReason.LENGTH


def test_an_end_without_tokens_waits_for_the_tokens_before_it() -> None:
    """An answer seems complete while its last tokens are still on their way."""
    mailbox = riding()
    mailbox.put(chunk(0, 1))
    mailbox.put(chunk(3, 0, FinishReason.STOP))
    mailbox.put_run(run(1, 2))
    mailbox.end()
    (whole,) = read(mailbox)
    assert (whole.token_ids, whole.finish_reason) == ([0, 1, 2], FinishReason.STOP)


def test_what_piled_up_is_one_chunk_with_all_it_says() -> None:
    """Logprobs, prompt logprobs or cached tokens of one of the parts are lost when they join."""
    rows = [TokenLogprobs(n, -float(n)) for n in range(3)]
    mailbox = TokenMailbox("a")
    mailbox.put(
        TokenChunk("a", [0], rows[:1], prompt_logprobs=[None], num_cached_tokens=5, replica="r")
    )
    mailbox.put_run(TokenRun(1, 1, [1], rows[1:2]))
    mailbox.put(TokenChunk("a", [2], rows[2:], finish_reason=FinishReason.STOP, num_preceding=2))
    mailbox.end()
    (whole,) = read(mailbox)
    assert (whole.token_ids, whole.logprobs) == ([0, 1, 2], rows)
    assert (whole.prompt_logprobs, whole.num_cached_tokens, whole.replica) == ([None], 5, "r")


def test_the_end_of_the_own_stream_waits_for_the_relay() -> None:
    """Under load the own stream is through while tokens are still on the relay: the answer breaks
    off although nothing is lost."""

    async def scenario() -> list[int]:
        mailbox = riding()
        mailbox.put(chunk(0, 1))
        mailbox.put(chunk(3, 1, FinishReason.STOP))
        mailbox.end()
        tokens = (await anext(mailbox)).token_ids
        rest = asyncio.ensure_future(anext(mailbox))
        await asyncio.sleep(0)
        mailbox.put_run(run(1, 2))
        return tokens + (await rest).token_ids

    assert asyncio.run(asyncio.wait_for(scenario(), 10.0)) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_gap_that_nothing_can_fill_is_an_error(is_lost_first: bool) -> None:
    """Tokens that were on a relay that broke are waited for, for ever, or left out unseen."""
    mailbox = riding()
    mailbox.put(chunk(0, 2))
    if is_lost_first:
        mailbox.lose_relay()
    mailbox.put(chunk(4, 1, FinishReason.STOP))
    if not is_lost_first:
        mailbox.lose_relay()
    with pytest.raises(TokensLost, match="2 to 3"):
        read(mailbox)


@pytest.mark.parametrize("has_run", [True, False])
def test_a_gap_without_a_relay_is_an_error(has_run: bool) -> None:
    """An answer whose first tokens never came is waited for, for ever."""
    mailbox = TokenMailbox("a")
    if has_run:
        mailbox.put_run(run(1, 2))
    else:
        mailbox.put(chunk(1, 0, FinishReason.STOP))
    mailbox.end()
    with pytest.raises(TokensLost, match="0 to 0"):
        read(mailbox)


def test_a_lost_relay_without_a_gap_is_no_matter() -> None:
    """An answer that lost nothing fails with the relay."""
    mailbox = riding()
    mailbox.put(chunk(0, 2))
    mailbox.lose_relay()
    mailbox.put(chunk(2, 1, FinishReason.STOP))
    mailbox.end()
    assert tokens_of(read(mailbox)) == [0, 1, 2]


def test_tokens_that_come_twice_are_an_error() -> None:
    """A client reads the same tokens twice."""
    mailbox = TokenMailbox("a")
    mailbox.put(chunk(0, 3))
    mailbox.put_run(run(1, 2))
    with pytest.raises(TokensLost, match="twice"):
        read(mailbox)


def test_a_failure_comes_after_what_was_there() -> None:
    """Tokens that arrived before their replica died are thrown away."""
    mailbox = TokenMailbox("a")
    mailbox.put(chunk(0, 3))
    mailbox.fail(RuntimeError("died"))

    async def scenario() -> None:
        assert (await anext(mailbox)).token_ids == [0, 1, 2]
        with pytest.raises(RuntimeError, match="died"):
            await anext(mailbox)

    asyncio.run(scenario())


def test_waiting_for_the_first_part_is_bounded() -> None:
    """A reader cannot look after a replica that sends nothing."""

    async def scenario() -> tuple[bool, bool]:
        mailbox = TokenMailbox("a")
        before = await mailbox.has_arrived(0.001)
        mailbox.put(chunk(0, 1))
        return before, await mailbox.has_arrived(10.0)

    assert asyncio.run(scenario()) == (False, True)
