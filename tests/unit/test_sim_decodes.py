"""Decodes that advance together, and the blocks of a replica that shares none."""

from __future__ import annotations

import pytest
from doubles import make_request

from deployments.engine.block_pool import IntegrityError, OutOfBlocks
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.request import Request
from deployments.execution.cost_model import StepShape
from loadtest import sim_decodes
from loadtest.sim_blocks import UnsharedBlocks
from loadtest.sim_decodes import RunningDecodes

BLOCK_SIZE = 4


class Decodes:
    """Running decodes over a small pool, and the tokens they were told of."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.kv = KVCacheManager(UnsharedBlocks(num_blocks), BLOCK_SIZE, False)
        self.tokens: dict[str, list[float]] = {}
        self.running = RunningDecodes(self.kv, BLOCK_SIZE, self._take)
        self.num_steps = 0

    def _take(self, request_id: str, times_s: object) -> None:
        self.tokens.setdefault(request_id, []).extend(times_s)  # type: ignore[call-overload]

    def join(self, num_prompt: int, num_left: int) -> Request:
        """One with a computed prompt and its first token, and so many to come."""
        incoming = make_request(num_prompt, max_tokens=num_left + 1)
        request = Request.arrive(incoming, now=0.0, index=0, seed=0, max_num_tokens=10_000)
        self.kv.admit(request, [])
        request.num_computed_tokens = num_prompt
        request.take_token(0, 0.0, frozenset())
        self.running.join(request)
        return request

    def step(self, num_steps: int = 1) -> list[Request]:
        self.running.take_blocks(num_steps)
        ends_s = [float(self.num_steps + each + 1) for each in range(num_steps)]
        self.num_steps += num_steps
        return self.running.book(ends_s)


def test_each_has_the_tokens_of_its_own_steps() -> None:
    """One that joins later gets tokens of steps before, or one that left goes on."""
    decodes = Decodes()
    first = decodes.join(6, 3)
    assert decodes.step() == []
    second = decodes.join(9, 5)
    assert decodes.step(2) == [first]
    assert decodes.tokens == {first.request_id: [1.0, 2.0, 3.0]}
    assert first.num_tokens == first.max_num_tokens == 10 and first.num_computed_tokens == 9
    decodes.step()
    decodes.running.leave_all()
    assert decodes.tokens[second.request_id] == [2.0, 3.0, 4.0]
    assert (second.num_tokens, second.num_computed_tokens, second.is_decode) == (13, 12, True)
    assert (second.last_token_s, second.token_gap_s) == (4.0, 1.0)
    assert len(decodes.running) == 0 and decodes.running.shape() == StepShape(0, 0)


def test_a_step_reads_the_context_of_all() -> None:
    """The cost model is told of too many tokens, of those before others left, or of another
    distance to the longest.
    """
    decodes = Decodes()
    decodes.join(6, 5)
    decodes.join(9, 2)
    assert decodes.running.shape() == StepShape(2, 7 + 10, skew_tokens=3)
    decodes.step()
    decodes.join(2, 9)
    assert decodes.running.shape() == StepShape(3, 8 + 11 + 3, skew_tokens=3 + 8)
    decodes.step()
    assert decodes.running.shape() == StepShape(2, 9 + 4, skew_tokens=5)


@pytest.mark.parametrize("num_prompt", range(3, 9))
def test_blocks_come_when_row_by_row_would_take_them(num_prompt: int) -> None:
    """A table is a block short or long, so the fleet's memory is not the service's."""
    decodes = Decodes()
    request = decodes.join(num_prompt, 20)
    for num_steps in (1, 1, 3, 1, 6, 1):
        decodes.step(num_steps)
        held = len(decodes.kv.block_table(request))
        assert held == decodes.kv.num_blocks_for(num_prompt + decodes.num_steps)


def test_nothing_is_promised_beyond_the_blocks_or_the_next_end() -> None:
    """Steps are booked together in which somebody ends, or has no block."""
    decodes = Decodes(num_blocks=1 + 2)
    decodes.join(4, 30)  # one block is full, one is left
    assert decodes.running.find_num_steps(64) == 4
    decodes.step(4)
    assert decodes.running.find_num_steps(64) == 0
    decodes = Decodes()
    decodes.join(4, 7)
    decodes.join(4, 5)
    assert decodes.running.find_num_steps(64) == 5 and decodes.running.find_num_steps(3) == 3


def test_times_that_nobody_needs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hours fills memory, or a token gets the time of another step."""
    monkeypatch.setattr(sim_decodes, "MIN_KEPT_TIMES", 8)
    decodes = Decodes()
    decodes.running = RunningDecodes(decodes.kv, BLOCK_SIZE, decodes._take)
    for _ in range(40):
        request = decodes.join(4, 3)
        first_s = decodes.num_steps + 1.0
        decodes.step(3)
        assert decodes.tokens[request.request_id] == [first_s, first_s + 1, first_s + 2]
        decodes.kv.free(request)
    assert len(decodes.running._ends_s) <= 8


def test_unshared_blocks_have_one_holder_each() -> None:
    """A block is given to two, or is lost."""
    pool = UnsharedBlocks(6)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5] and pool.num_free_blocks == 0
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    pool.release(first)
    assert pool.num_free_blocks == 2 and pool.num_usable_blocks == 5
    pool.check_integrity()
    pool.release(first)
    with pytest.raises(IntegrityError):
        pool.check_integrity()
    with pytest.raises(IntegrityError):
        pool.share(second)
