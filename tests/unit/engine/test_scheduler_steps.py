"""What is in a step and in which order: stall-free decodes, budget and chunk, short first, forced
by age.
"""

from __future__ import annotations

import pytest
from doubles import (
    PagedFakeExecutor,
    collect,
    make_engine,
    make_limits,
    make_request,
    make_scheduler,
    oracle_tokens,
    run_until_done,
)

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ChunkReason
from deployments.engine.stats import ChunkRecord


def last_chunks(engine: Engine) -> list[ChunkRecord]:
    """The rows of the last step."""
    return list(tuple(engine.step_log.steps)[-1].chunks)


def test_a_long_prompt_never_stalls_a_running_decode() -> None:
    """While a prompt of 4,000 tokens is prefilled, some running chat misses a step."""
    executor = PagedFakeExecutor(make_limits(num_blocks=600, block_size=16))
    engine = make_engine(executor, chunk_size=256, max_num_seqs=16)
    chats = [make_request(20, max_tokens=60) for _ in range(8)]
    for chat in chats:
        engine.add(chat)
    long = make_request(4000)

    def arrive(step: int) -> None:
        if step == 5:
            engine.add(long)

    outcomes = run_until_done(engine, arrive)
    assert outcomes[long.request_id].token_steps[0] >= 5 + 4000 // 256
    for chat in chats:
        steps = outcomes[chat.request_id].token_steps
        gaps = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
        assert len(steps) == 60 and max(gaps) == 1


def test_the_budget_is_shared_and_the_chunk_is_a_cap_of_its_own() -> None:
    """One prompt takes the whole budget of a step, or the budget is not used up by others."""
    engine = make_engine(chunk_size=8, max_num_batched_tokens=20)
    first, second, third = (make_request(40) for _ in range(3))
    for request in (first, second, third):
        engine.add(request)
    engine.step()
    assert [(row.request_id, row.num_tokens) for row in last_chunks(engine)] == [
        (first.request_id, 8),
        (second.request_id, 8),
        (third.request_id, 4),
    ]


def test_a_request_may_ask_for_smaller_chunks_not_for_larger() -> None:
    """A request's own chunk_size is ignored, or lifts the engine's."""
    engine = make_engine(chunk_size=8)
    engine.add(make_request(12, chunk_size=3))
    engine.add(make_request(40, chunk_size=30))
    engine.step()
    assert [row.num_tokens for row in last_chunks(engine)] == [3, 8]


@pytest.mark.parametrize("overlap_ratio", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("num_tokens", [7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_chunks_never_change_the_text(num_tokens: int, overlap_ratio: float) -> None:
    """B37: a chunk or a prompt that ends at (or beside) a block's or a chunk's end changes
    tokens.
    """
    engine = make_engine(chunk_size=8, overlap_ratio=overlap_ratio)
    request = make_request(num_tokens, max_tokens=9)
    engine.add(request)
    outcome = run_until_done(engine)[request.request_id]
    assert outcome.token_ids == oracle_tokens(request, make_limits())[0]


def test_overlap_makes_chunks_smaller_not_longer() -> None:
    """1.3: overlap is computed again instead of read from the cache."""
    engine = make_engine(chunk_size=8, overlap_ratio=0.25)
    engine.add(make_request(20, max_tokens=1))
    run_until_done(engine)
    rows = [step.chunks[0] for step in engine.step_log.steps]
    assert [(row.start, row.num_tokens) for row in rows] == [(0, 8), (8, 6), (14, 6)]


def test_short_prompts_overtake_a_long_one() -> None:
    """B46: short prompts behind a prompt of 64 chunks see its whole prefill as their TTFT."""
    executor = PagedFakeExecutor(make_limits(num_blocks=1000))
    engine = make_engine(executor, chunk_size=32, max_num_seqs=32, max_num_batched_tokens=600)
    long = make_request(64 * 32, max_tokens=1)
    engine.add(long)
    outcomes = {}
    for step in range(3):
        collect(outcomes, engine.step(), step)
    shorts = [make_request(50, max_tokens=1) for _ in range(20)]
    for short in shorts:
        engine.add(short)
    for step in range(3, 200):
        collect(outcomes, engine.step() if engine.has_requests else [], step)
    waits = [outcomes[short.request_id].token_steps[0] - 3 for short in shorts]
    assert max(waits) <= 3  # two chunks of 25 for each, 1,000 tokens in steps of 600
    assert outcomes[long.request_id].token_ids == oracle_tokens(long, executor.limits)[0]
    assert outcomes[long.request_id].token_steps[0] < 70


def test_a_forced_chunk_goes_before_any_shorter_one_of_its_class() -> None:
    """2.3: shorter prompts that keep coming starve a long one; or the log does not say it was
    forced.
    """
    clock = VirtualClock()
    engine = make_engine(
        clock=clock, batch_timeout_ms=50, max_num_seqs=1, max_num_batched_tokens=9, chunk_size=8
    )
    long = make_request(16, max_tokens=1)
    blocker = make_request(2, max_tokens=1)
    engine.add(long)
    engine.add(blocker)
    started: list[str] = []
    for number in range(8):
        engine.add(make_request(3, f"short-{number}", max_tokens=1))
        engine.step()
        started += [row.request_id for row in last_chunks(engine)]
        clock.advance(0.02)
    assert started[:3] == [blocker.request_id, "short-0", "short-1"]
    assert started[3:5] == [long.request_id] * 2
    forced = [row for step in engine.step_log.steps for row in step.chunks if row.is_forced]
    assert forced[0].request_id == long.request_id
    assert engine.stats().num_forced_chunks == len(forced)


def test_a_running_prefill_that_was_left_out_is_forced() -> None:
    """2.3: short prompts that keep coming starve a long one between two of its chunks."""
    clock = VirtualClock()
    engine = make_engine(
        clock=clock, batch_timeout_ms=50, max_num_seqs=8, max_num_batched_tokens=9, chunk_size=8
    )
    long = make_request(64, max_tokens=1)
    engine.add(long)
    engine.step()
    reached: list[int] = []
    for step in range(30):
        for _ in range(2):
            engine.add(make_request(6, max_tokens=1))
        engine.step()
        clock.advance(0.02)
        if any(row.request_id == long.request_id and row.is_forced for row in last_chunks(engine)):
            reached.append(step)
    assert len(reached) >= 5, "the long prompt stands still"


def test_decodes_come_first_and_reasons_say_why() -> None:
    """5.3: the step log does not tell which chunk ran when, and why."""
    engine = make_engine(chunk_size=8)
    chat, prompt = make_request(4, "chat", max_tokens=9), make_request(20, "prompt", max_tokens=2)
    engine.add(chat)
    engine.step()
    engine.add(prompt)
    for _ in range(4):
        engine.step()
    rows = [[(r.request_id, r.start, r.reason) for r in step.chunks] for step in steps(engine)]
    assert rows == [
        [("chat", 0, ChunkReason.ADMITTED)],
        [("chat", 4, ChunkReason.DECODE), ("prompt", 0, ChunkReason.ADMITTED)],
        [("chat", 5, ChunkReason.DECODE), ("prompt", 7, ChunkReason.CONTINUED)],
        [("chat", 6, ChunkReason.DECODE), ("prompt", 14, ChunkReason.CONTINUED)],
        [("chat", 7, ChunkReason.DECODE), ("prompt", 20, ChunkReason.DECODE)],
    ]
    assert [step.index for step in steps(engine)] == [0, 1, 2, 3, 4]
    assert [step.num_prefill_tokens for step in steps(engine)] == [4, 7, 7, 6, 0]


def steps(engine: Engine) -> list:
    return list(engine.step_log.steps)


def test_chunks_of_a_prompt_run_in_order() -> None:
    """5.3: a later chunk of a prompt runs before an earlier one, or one is skipped."""
    engine = make_engine(chunk_size=8, max_num_batched_tokens=13, max_num_seqs=12)
    prompts = [make_request(30 + number, max_tokens=3) for number in range(6)]
    for prompt in prompts:
        engine.add(prompt)
    run_until_done(engine)
    for prompt in prompts:
        rows = [
            row
            for step in steps(engine)
            for row in step.chunks
            if row.request_id == prompt.request_id
        ]
        end = 0
        for row in rows:
            assert row.start == end
            end += row.num_tokens
        assert end == len(prompt.prompt_token_ids) + 2


def test_an_idle_engine_holds_a_small_batch_up_to_the_timeout() -> None:
    """2.4: a small first batch starts at once although min_batch_tokens is set, or is held
    longer.
    """
    clock = VirtualClock()
    scheduler = make_scheduler(clock=clock, min_batch_tokens=20, batch_timeout_ms=50)
    assert scheduler.find_hold_until_s() is None
    scheduler.add(make_request(8), seed=0)
    clock.advance(0.03)
    scheduler.add(make_request(8), seed=0)
    assert scheduler.find_hold_until_s() == 0.05
    clock.advance(0.021)
    assert scheduler.find_hold_until_s() is None


def test_enough_tokens_end_the_hold() -> None:
    """2.4: a batch that is large enough is held all the same."""
    scheduler = make_scheduler(min_batch_tokens=20)
    scheduler.add(make_request(8), seed=0)
    assert scheduler.find_hold_until_s() is not None
    scheduler.add(make_request(12), seed=0)
    assert scheduler.find_hold_until_s() is None


def test_nothing_is_held_while_anything_runs_nor_by_default() -> None:
    """2.4: the timeout delays a step while requests run, or without min_batch_tokens."""
    scheduler = make_scheduler(min_batch_tokens=20)
    scheduler.add(make_request(8), seed=0)
    scheduler.schedule()
    scheduler.add(make_request(3), seed=0)
    assert scheduler.find_hold_until_s() is None
    by_default = make_scheduler()
    by_default.add(make_request(1), seed=0)
    assert by_default.find_hold_until_s() is None


def test_a_cached_prefix_counts_as_short() -> None:
    """Short first looks at all tokens of a prompt, not at those it must compute."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=12)
    prefix = list(range(1, 33))
    engine.add(make_request(prefix, max_tokens=1))
    run_until_done(engine)
    engine.add(make_request(10, "shorter", max_tokens=1))
    engine.add(make_request([*prefix, 9], "cached", max_tokens=1))
    engine.step()
    assert [row.request_id for row in last_chunks(engine)] == ["cached"]
