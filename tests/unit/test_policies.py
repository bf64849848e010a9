"""The stand-ins of the old ways batch as their papers say, behind the engine's own interface."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doubles import PagedFakeExecutor, make_config, make_limits, make_request, oracle_tokens

from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits
from deployments.engine.step_budget import FixedBudget, ShrinkingBudget
from deployments.protocol import FinishReason, GenerateRequest, RequestRefused
from loadtest.policies import POLICIES

OLD_WAYS = [name for name in POLICIES if name != "chunked"]


def engine_of(policy: str, limits: ModelLimits | None = None, **settings: object) -> Engine:
    executor = PagedFakeExecutor(limits or make_limits(num_blocks=200))
    config, clock = make_config(**settings), VirtualClock()
    kv = KVCacheManager(BlockPool(executor.limits.num_blocks), executor.limits.block_size, False)
    budget = ShrinkingBudget(FixedBudget(config.token_budget))
    scheduler = POLICIES[policy](config, executor.limits, kv, budget, clock)
    return Engine(scheduler, executor, clock, budget)


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, list[int]]:
    """Every token of every request; the books are compared after each step."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_requests:
        for output in engine.step():
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
    return tokens


def steps_of(engine: Engine) -> list[tuple[int, int]]:
    """(decode tokens, prefill tokens) of each step."""
    return [(step.num_decode_tokens, step.num_prefill_tokens) for step in engine.step_log.steps]


@pytest.mark.parametrize("policy", OLD_WAYS)
def test_an_old_way_gives_everybody_the_right_tokens(policy: str) -> None:
    """A policy loses a request, feeds it wrong blocks, or keeps blocks at the end."""
    requests = [make_request(5 + 7 * i, max_tokens=3 + i, ignore_eos=True) for i in range(8)]
    limits = make_limits(num_blocks=200, max_model_len=100)
    engine = engine_of(policy, limits, max_num_seqs=3)
    tokens = run(engine, requests)
    for request in requests:
        assert tokens[request.request_id] == oracle_tokens(request, limits)[0]


def test_prefill_first_stops_every_decode_while_a_prompt_runs() -> None:
    """Decodes ride along with prompts, so the comparison hides what chunking is for."""
    engine = engine_of("prefill-first", max_num_batched_tokens=40)
    engine.add(make_request(10, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    for num_tokens in (30, 30, 50):
        engine.add(make_request(num_tokens, max_tokens=2, ignore_eos=True))
    while engine.has_requests:
        engine.step()
    # One prompt of 30 a step, for two exceed 40; that of 50 runs alone although it exceeds 40.
    assert steps_of(engine)[:6] == [(0, 10), (1, 0), (0, 30), (0, 30), (0, 50), (4, 0)]


def test_prefill_first_preempts_the_last_that_came_when_memory_runs_out() -> None:
    """The old way cannot run out of memory, as if it knew how long answers will be."""
    limits = make_limits(num_blocks=9, block_size=4)
    requests = [make_request(12, max_tokens=12, ignore_eos=True) for _ in range(2)]
    engine = engine_of("prefill-first", limits)
    tokens = run(engine, requests)
    assert engine.stats().num_preemptions == 1
    for request in requests:
        assert tokens[request.request_id] == oracle_tokens(request, limits)[0]


def test_orca_runs_whole_prompts_beside_decodes() -> None:
    """A prompt is cut, or the decodes of its step wait."""
    engine = engine_of("orca", make_limits(num_blocks=200, max_model_len=100))
    engine.add(make_request(10, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add(make_request(60, max_tokens=2, ignore_eos=True))
    engine.step()
    assert steps_of(engine) == [(0, 10), (1, 60)]


def test_orca_reserves_memory_for_the_longest_answer() -> None:
    """Orca admits by what requests use now, which it could not do."""
    limits = make_limits(num_blocks=31, block_size=4, max_model_len=60)
    engine = engine_of("orca", limits)
    for _ in range(3):
        engine.add(make_request(4))
    engine.step()
    assert engine.stats().num_running == 2


def test_a_static_batch_takes_nobody_in_until_it_is_done() -> None:
    """A request joins a running batch, or those that have finished hold the batch's slots of the
    next one.
    """
    engine = engine_of("static", max_num_seqs=2)
    for num_tokens, max_tokens in ((5, 4), (6, 2), (7, 1)):
        engine.add(make_request(num_tokens, max_tokens=max_tokens, ignore_eos=True))
    while engine.has_requests:
        engine.step()
    assert steps_of(engine) == [(0, 11), (2, 0), (1, 0), (1, 0), (0, 7)]


@pytest.mark.parametrize("policy", OLD_WAYS)
def test_an_abort_frees_a_request_wherever_it_stands(policy: str) -> None:
    """An aborted request keeps its place in the queue or its blocks."""
    engine = engine_of(policy, max_num_seqs=1)
    running, waiting = make_request(8, max_tokens=50), make_request(8)
    engine.add(running)
    engine.add(waiting)
    engine.step()
    for request in (running, waiting):
        output = engine.abort(request.request_id)
        assert output is not None and output.finish_reason is FinishReason.ABORT
    assert not engine.has_requests
    engine.check_integrity()


@pytest.mark.parametrize("policy", OLD_WAYS)
def test_a_full_queue_refuses(policy: str) -> None:
    """A comparison lets one policy queue without bound and another not."""
    engine = engine_of(policy, max_num_waiting=1)
    engine.add(make_request(8))
    with pytest.raises(RequestRefused):
        engine.add(make_request(8))
