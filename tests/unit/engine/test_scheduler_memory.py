"""What happens where blocks or slots run out, and what the prefix cache may be used for."""

from __future__ import annotations

import pytest
from doubles import (
    Outcome,
    PagedFakeExecutor,
    collect,
    make_engine,
    make_limits,
    make_request,
    oracle_tokens,
    run_until_done,
)

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ChunkReason
from deployments.protocol import FinishReason, GenerateRequest


def tiny(num_blocks: int, **limits: int) -> PagedFakeExecutor:
    return PagedFakeExecutor(make_limits(num_blocks=num_blocks, **limits))


def rows_of(engine: Engine, request: GenerateRequest) -> list[tuple[int, ChunkReason]]:
    """(step, reason) of each share that a request had."""
    return [
        (step.index, row.reason)
        for step in engine.step_log.steps
        for row in step.chunks
        if row.request_id == request.request_id
    ]


def first_steps(engine: Engine, requests: list[GenerateRequest]) -> list[int]:
    return [rows_of(engine, request)[0][0] for request in requests]


def test_small_requests_pass_a_head_that_does_not_fit_but_not_for_ever() -> None:
    """B47: small requests wait behind a head that does not fit; or pass it without a bound."""
    engine = make_engine(tiny(13), batch_timeout_ms=0, max_num_passes=3, max_num_seqs=12)
    engine.add(make_request(20, max_tokens=12))  # holds 5 to 8 of 12 blocks for 12 steps
    engine.step()
    head = make_request(40, max_tokens=1)  # needs 10
    engine.add(head)
    smalls = [make_request(4, max_tokens=1) for _ in range(8)]
    for small in smalls:
        engine.add(small)
    run_until_done(engine)
    (started,) = first_steps(engine, [head])
    assert sum(step < started for step in first_steps(engine, smalls)) == 3


def test_a_head_that_cannot_be_passed_blocks_only_until_it_fits() -> None:
    """B47: after the bound is reached nobody runs any more."""
    engine = make_engine(tiny(9), batch_timeout_ms=0, max_num_passes=0)
    engine.add(make_request(20, max_tokens=6))
    engine.step()
    head, small = make_request(28, max_tokens=1), make_request(2, max_tokens=1)
    engine.add(head)
    engine.add(small)
    outcomes = run_until_done(engine)
    assert first_steps(engine, [head, small]) == sorted(first_steps(engine, [head, small]))
    assert outcomes[small.request_id].finish_reason is FinishReason.LENGTH


def test_an_urgent_head_preempts_when_the_slots_are_full() -> None:
    """B50: a more urgent request waits because all running slots are taken by less urgent ones."""
    engine = make_engine(max_num_seqs=3)
    lows = [make_request(6, max_tokens=30, priority=1) for _ in range(3)]
    high = make_request(6, max_tokens=2, priority=0)
    for low in lows:
        engine.add(low)

    def arrive(step: int) -> None:
        if step == 10:
            engine.add(high)

    outcomes = run_until_done(engine, arrive)
    assert outcomes[high.request_id].token_steps == [10, 11]
    for low in lows:
        assert outcomes[low.request_id].token_ids == oracle_tokens(low, make_limits())[0]
    preemptions = [outcomes[low.request_id].last.timings.num_preemptions for low in lows]
    assert preemptions == [0, 0, 1], "the victim is not the least urgent"


def test_an_urgent_head_preempts_when_the_blocks_are_taken() -> None:
    """B50: a more urgent request waits for blocks that less urgent ones hold."""
    executor = tiny(9)
    engine = make_engine(executor)
    lows = [make_request(12, max_tokens=5, priority=2), make_request(13, max_tokens=5, priority=1)]
    high = make_request(14, max_tokens=2, priority=0)
    for low in lows:
        engine.add(low)

    def arrive(step: int) -> None:
        if step == 4:
            engine.add(high)

    outcomes = run_until_done(engine, arrive)
    assert rows_of(engine, high)[0][0] == 4
    for request in (*lows, high):
        tokens = oracle_tokens(request, executor.limits)[0]
        assert outcomes[request.request_id].token_ids == tokens


def test_an_equally_urgent_head_preempts_nobody() -> None:
    """Requests of one class preempt each other, so that work is thrown away for nothing."""
    engine = make_engine(max_num_seqs=2)
    for _ in range(6):
        engine.add(make_request(6, max_tokens=8))
    run_until_done(engine)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("num_output_tokens", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_request_gives_the_same_tokens(
    num_output_tokens: int, temperature: float
) -> None:
    """B44: a request preempted in its prefill, or after n tokens, loses or repeats some, draws
    other random numbers, or takes its output for prompt."""
    executor = tiny(12)
    engine = make_engine(executor)
    low = make_request(
        17, max_tokens=25, priority=1, temperature=temperature, seed=5, repetition_penalty=1.5
    )
    engine.add(low)
    outcomes: dict[str, Outcome] = {}
    num_preempted = 0
    for step in range(200):
        tokens = outcomes.get(low.request_id, Outcome()).token_ids
        if len(tokens) >= num_output_tokens and num_preempted < 3 and step and step % 4 == 0:
            num_preempted += 1
            engine.add(make_request(42, max_tokens=1, priority=0))
        if engine.has_requests:
            collect(outcomes, engine.step(), step)
            engine.check_integrity()
    outcome = outcomes[low.request_id]
    assert outcome.last.timings.num_preemptions >= 1
    assert outcome.token_ids == oracle_tokens(low, executor.limits)[0]
    assert len(outcome.token_ids) == 25
    resumed = [reason for _, reason in rows_of(engine, low) if reason is ChunkReason.RESUMED]
    assert len(resumed) == outcome.last.timings.num_preemptions


def test_decodes_that_outgrow_the_pool_end_all_the_same() -> None:
    """B17: decodes that need blocks preempt each other in circles."""
    executor = tiny(10)
    engine = make_engine(executor)
    requests = [make_request(5 + number, max_tokens=20) for number in range(6)]
    for request in requests:
        engine.add(request)
    outcomes = run_until_done(engine, max_steps=400)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        tokens = oracle_tokens(request, executor.limits)[0]
        assert outcomes[request.request_id].token_ids == tokens
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_nobody_preempted_comes_back_in_the_same_step() -> None:
    """B49: a victim is scheduled in the step that took its blocks, since it fits into what is
    left.
    """
    engine = make_engine(tiny(9), chunk_size=32)
    small = make_request(2, max_tokens=6, priority=2)  # 1 block
    large = make_request(9, max_tokens=6, priority=1)  # 3 blocks
    for request in (make_request(13, max_tokens=3), large, small):
        engine.add(request)
    engine.step()
    assert engine.stats().num_free_blocks == 0
    head = make_request(6, max_tokens=1)  # 2 blocks: both go, and the small one would fit again
    engine.add(head)
    engine.step()
    engine.check_integrity()
    assert engine.stats().num_preemptions == 2
    steps = {
        request.request_id: rows_of(engine, request)[-1][0] for request in (small, large, head)
    }
    assert list(steps.values()) == [0, 0, 1]
    run_until_done(engine)


def test_blocks_are_found_only_after_their_step() -> None:
    """Two equal prompts admitted in one step read blocks that this very step fills."""
    engine = make_engine(chunk_size=32)
    prompt = list(range(1, 18))
    twins = [make_request(prompt, max_tokens=6) for _ in range(2)]
    for twin in twins:
        engine.add(twin)
    outcomes = run_until_done(engine)
    later = make_request(prompt, max_tokens=6)
    engine.add(later)
    outcomes |= run_until_done(engine)
    assert [outcomes[r.request_id].num_cached_tokens for r in (*twins, later)] == [0, 0, 16]
    for request in (*twins, later):
        assert outcomes[request.request_id].token_ids == oracle_tokens(twins[0], make_limits())[0]


def test_a_prompt_sent_twice_is_answered_twice_alike() -> None:
    """B38, B41: the second of two equal prompts, whole or half cached, is answered differently."""
    prompt = list(range(1, 25))
    half = [*prompt[:12], *range(101, 113)]
    engine = make_engine()
    outcomes = {}
    requests = [make_request(tokens, max_tokens=8) for tokens in (prompt, prompt, half, half)]
    for request in requests:
        engine.add(request)
        outcomes |= run_until_done(engine)
    hits = [outcomes[request.request_id].num_cached_tokens for request in requests]
    assert hits == [0, 20, 12, 20]
    for request in requests:
        tokens = oracle_tokens(request, make_limits())[0]
        assert outcomes[request.request_id].token_ids == tokens


def test_a_prefix_evicted_while_its_request_waited_is_not_used() -> None:
    """B40: the hit is remembered from the queue, its blocks are overwritten before it runs."""
    executor = tiny(9)
    engine = make_engine(executor, max_num_seqs=1, max_num_batched_tokens=9, batch_timeout_ms=0)
    prompt = list(range(1, 10))
    engine.add(make_request(prompt, max_tokens=1))
    run_until_done(engine)
    evictor, waiter = make_request(30, max_tokens=2), make_request(prompt, max_tokens=4)
    engine.add(evictor)
    engine.add(waiter)
    outcomes = run_until_done(engine)
    outcome = outcomes[waiter.request_id]
    assert outcome.num_cached_tokens == 0
    assert outcome.token_ids == oracle_tokens(waiter, executor.limits)[0]


def test_salts_never_share() -> None:
    """B55, B56: one tenant's prompt makes another tenant's equal prompt faster, or wrong."""
    engine = make_engine()
    prompt = list(range(1, 18))
    hits = {}
    for name, salt in (("a", "a"), ("b", "b"), ("none", ""), ("a again", "a")):
        engine.add(make_request(prompt, name, cache_salt=salt))
        outcome = run_until_done(engine)[name]
        hits[name] = outcome.num_cached_tokens
        expected = oracle_tokens(make_request(prompt, cache_salt=salt), make_limits())[0]
        assert outcome.token_ids == expected
    assert hits == {"a": 0, "b": 0, "none": 0, "a again": 16}


def test_with_caching_off_no_token_counts_as_cached() -> None:
    """enable_prefix_caching: false still reuses blocks."""
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        engine.add(make_request(list(range(1, 18))))
        assert [o.num_cached_tokens for o in run_until_done(engine).values()] == [0]


def test_nobody_is_admitted_into_the_blocks_of_a_victim_of_the_same_step() -> None:
    """A younger request moves into the blocks that were taken from an older one in the same step,
    so that work is thrown away twice.
    """
    engine = make_engine(tiny(9), batch_timeout_ms=0, chunk_size=32, enable_prefix_caching=False)
    engine.add(make_request(12, max_tokens=16))  # 3 of 8 blocks, and it grows
    engine.add(make_request(16, max_tokens=12))  # 4 blocks, and it grows too
    engine.step()
    younger = make_request(8, max_tokens=4)
    engine.add(younger)
    engine.step()
    assert engine.stats().num_preemptions == 1
    assert engine.stats().num_free_blocks == 4
    assert rows_of(engine, younger) == []


def test_a_preempted_request_comes_back_before_those_that_came_later() -> None:
    """A request that already streams waits behind everybody who arrived while it ran."""
    clock = VirtualClock()
    settings = {"batch_timeout_ms": 50, "max_num_seqs": 2, "max_num_passes": 0, "chunk_size": 32}
    engine = make_engine(tiny(9), clock, enable_prefix_caching=False, **settings)
    engine.add(make_request(12, max_tokens=12))
    victim = make_request(16, max_tokens=8)
    engine.add(victim)
    engine.step()
    later = [make_request(8, max_tokens=2) for _ in range(6)]
    for request in later:
        engine.add(request)
    while engine.has_requests:
        clock.advance(0.1)
        engine.step()
    resumed = [step for step, reason in rows_of(engine, victim) if reason is ChunkReason.RESUMED]
    assert len(resumed) == 1
    assert all(resumed[0] <= started for started in first_steps(engine, later))
