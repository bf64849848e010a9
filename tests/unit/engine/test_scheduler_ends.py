"""Every way a request ends: refused, finished, aborted at any moment, failed; and that others go
on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doubles import (
    EOS_TOKEN_ID,
    FaultyExecutor,
    PagedFakeExecutor,
    ScriptedExecutor,
    make_engine,
    make_limits,
    make_request,
    make_scheduler,
    oracle_tokens,
    run_until_done,
)

from deployments.engine.engine import Engine, EngineFailed
from deployments.engine.outputs import ModelOutput, SchedulerOutput
from deployments.engine.request import IllegalTransition, Request, RequestStatus
from deployments.engine.scheduler import Scheduler
from deployments.protocol import ErrorKind, FinishReason, GenerateRequest, RequestRefused

CONTEXT = 40
SMALL = make_limits(num_blocks=9, block_size=4, max_model_len=CONTEXT)  # 32 tokens in the pool
WIDE = make_limits(num_blocks=64, block_size=4, max_model_len=CONTEXT)


@pytest.mark.parametrize(
    ("request_", "kind", "param"),
    [
        (make_request([]), ErrorKind.INVALID, "prompt"),
        (make_request([1, 1000]), ErrorKind.INVALID, "prompt"),
        (make_request([1, -1]), ErrorKind.INVALID, "prompt"),
        (make_request([1, 1.5]), ErrorKind.INVALID, "prompt"),
        (make_request([1, float("nan")]), ErrorKind.INVALID, "prompt"),
        (make_request([1, None]), ErrorKind.INVALID, "prompt"),
        (make_request([1, "2"]), ErrorKind.INVALID, "prompt"),
        (make_request(CONTEXT), ErrorKind.CONTEXT_LENGTH, "prompt"),
        (make_request(CONTEXT + 1), ErrorKind.CONTEXT_LENGTH, "prompt"),
        (make_request(2 * CONTEXT), ErrorKind.CONTEXT_LENGTH, "prompt"),
        (make_request(33), ErrorKind.CONTEXT_LENGTH, "prompt"),
        (make_request(max_tokens=CONTEXT + 1), ErrorKind.INVALID, "max_tokens"),
        (make_request(priority=-1), ErrorKind.INVALID, "priority"),
        (make_request(chunk_size=0), ErrorKind.INVALID, "chunk_size"),
        (make_request(stop_token_ids=(1000,)), ErrorKind.INVALID, "stop_token_ids"),
        (make_request(logit_bias=((1000, 1.0),)), ErrorKind.INVALID, "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_and_all_else_goes_on(
    request_: GenerateRequest, kind: ErrorKind, param: str
) -> None:
    """B13, B14, B16: a bad prompt takes the engine down, or waits for ever and everybody behind
    it.
    """
    engine = make_engine(PagedFakeExecutor(SMALL))
    good = [make_request(6, max_tokens=3) for _ in range(2)]
    engine.add(good[0])
    engine.step()
    with pytest.raises(RequestRefused) as refusal:
        engine.add(request_)
    assert (refusal.value.info.kind, refusal.value.info.param) == (kind, param)
    engine.add(good[1])
    engine.check_integrity()
    outcomes = run_until_done(engine)
    assert outcomes[good[0].request_id].finish_reason is FinishReason.LENGTH
    assert outcomes[good[1].request_id].token_ids == oracle_tokens(good[1], SMALL)[0]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_prompt_one_short_of_the_context_gives_one_token() -> None:
    """B14: a prompt of context - 1 tokens crashes, or gives no token, or two."""
    engine = make_engine(PagedFakeExecutor(WIDE))
    for num_tokens, num_output in ((CONTEXT - 1, 1), (CONTEXT - 2, 2)):
        request = make_request(num_tokens, max_tokens=9)
        engine.add(request)
        outcome = run_until_done(engine)[request.request_id]
        assert len(outcome.token_ids) == num_output
        assert outcome.finish_reason is FinishReason.LENGTH


def test_a_request_that_alone_outgrows_the_pool_ends_with_length() -> None:
    """B16: a request that fits at first, and then no longer, preempts itself for ever."""
    engine = make_engine(PagedFakeExecutor(SMALL))
    request = make_request(30, max_tokens=30)
    engine.add(request)
    outcome = run_until_done(engine)[request.request_id]
    assert (len(outcome.token_ids), outcome.finish_reason) == (2, FinishReason.LENGTH)
    assert engine.stats().num_preemptions == 0


def test_an_id_in_use_and_a_full_queue_are_refused() -> None:
    """Two requests of one id mix their tokens (B34), or the queue grows without bound (B61)."""
    engine = make_engine(max_num_waiting=2)
    engine.add(make_request(4, "a"))
    for name, kind in (("a", ErrorKind.INVALID), ("b", None), ("c", ErrorKind.OVERLOADED)):
        if kind is None:
            engine.add(make_request(4, name))
            continue
        with pytest.raises(RequestRefused) as refusal:
            engine.add(make_request(4, name))
        assert refusal.value.info.kind is kind
    assert set(run_until_done(engine)) == {"a", "b"}


def finish(script: list[int], **params: object) -> tuple[list[int], FinishReason, int | None]:
    """What a reader sees of a model that emits `script`."""
    engine = make_engine(ScriptedExecutor({"r": script}))
    engine.add(make_request(4, "r", **params))
    outcome = run_until_done(engine)["r"]
    return outcome.token_ids, outcome.finish_reason, outcome.last.stop_token_id


def test_why_a_request_finishes() -> None:
    """B11, B25, B26: a wrong reason, a token too many or too few, or an end token ignored."""
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    eos = EOS_TOKEN_ID
    assert finish([5, 6, 7, 8], max_tokens=3) == ([5, 6, 7], length, None)
    assert finish([5, eos, 7], max_tokens=9) == ([5, eos], stop, None)
    assert finish([5, eos, 7], max_tokens=3, ignore_eos=True) == ([5, eos, 7], length, None)
    assert finish([5, 6, 7], max_tokens=9, stop_token_ids=(6,)) == ([5, 6], stop, 6)
    assert finish([eos, 6, eos], max_tokens=9, min_tokens=2) == ([eos, 6, eos], stop, None)
    assert finish([5], max_tokens=1, stop_token_ids=(5,)) == ([5], stop, 5)


STATES: dict[str, Callable[[Engine, str], None]] = {
    "waiting": lambda engine, victim: None,
    "between chunks": lambda engine, victim: step_times(engine, 2),
    "after the last chunk": lambda engine, victim: step_times(engine, 3),
    "decoding": lambda engine, victim: step_times(engine, 5),
}


def step_times(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


@pytest.mark.parametrize("state", STATES)
def test_an_abort_between_steps_frees_everything_at_once(state: str) -> None:
    """B52, B58: a request aborted in this state keeps blocks, or is run all the same."""
    engine = make_engine()
    other = make_request(4, "other", max_tokens=20)
    engine.add(other)
    engine.step()
    free = engine.stats().num_free_blocks
    engine.add(make_request(20, "victim", max_tokens=8))
    STATES[state](engine, "victim")
    rows_before = sum(len(step.chunks) for step in engine.step_log.steps)
    output = engine.abort("victim")
    assert output is not None and output.finish_reason is FinishReason.ABORT
    engine.check_integrity()
    assert engine.stats().num_free_blocks >= free - 2
    assert engine.stats().num_finished == {"abort": 1}
    outcomes = run_until_done(engine)
    assert set(outcomes) == {"other"}
    rows = [row for step in engine.step_log.steps for row in step.chunks][rows_before:]
    assert {row.request_id for row in rows} == {"other"}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("num_steps_before", range(6))
def test_an_abort_while_the_step_runs_gives_no_token(num_steps_before: int) -> None:
    """B52, B53: a token comes after the abort, or the request counts as a success, or is freed
    twice.
    """
    engine = make_engine()
    engine.add(make_request(20, "victim", max_tokens=4))
    engine.add(make_request(5, "other", max_tokens=9))
    step_times(engine, num_steps_before)
    aborted = []
    outputs = engine.step(lambda: aborted.append(engine.abort("victim")))
    engine.check_integrity()
    assert "victim" not in {output.request_id for output in outputs}
    assert engine.abort("victim") is None
    if aborted[0] is not None:
        assert engine.stats().num_finished["abort"] == 1
    run_until_done(engine)
    assert engine.stats().num_finished["length"] == (1 if aborted[0] else 2)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_an_id_may_come_back_while_its_aborted_step_runs() -> None:
    """B34, B53: the token of an aborted request goes to a new one of the same id."""
    engine = make_engine()
    engine.add(make_request(4, "r"))
    again = make_request([9, 8, 7], "r")

    def replace() -> None:
        engine.abort("r")
        engine.add(again)

    assert engine.step(replace) == []
    assert run_until_done(engine)["r"].token_ids == oracle_tokens(again, make_limits())[0]


def test_aborting_an_unknown_id_is_no_error() -> None:
    """B52: an abort that comes late ends the engine."""
    assert make_engine().abort("nobody") is None


def test_ten_thousand_aborts_leave_nothing() -> None:
    """B52: each abort loses a little, and the pool is exhausted after a day."""
    engine = make_engine(chunk_size=4)
    for number in range(10_000):
        engine.add(make_request(9, f"r{number}", max_tokens=1 + number % 2))
        step_times(engine, number % 4)
        engine.abort(f"r{number}")
    engine.check_integrity()
    assert not engine.has_requests
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine._scheduler._kv._tables == {} and engine._scheduler._waiting._classes == {}


def test_a_failed_step_ends_its_requests_alone_and_leaves_nothing_behind() -> None:
    """A step that raised ends everybody; or what it half wrote is served from the prefix cache."""
    executor = FaultyExecutor(raise_in={1: RuntimeError("out of memory")})
    engine = make_engine(executor, chunk_size=8, max_num_seqs=2, max_num_batched_tokens=16)
    prompt = list(range(1, 18))
    failing = [make_request(prompt, max_tokens=5), make_request(18, max_tokens=5)]
    waiting = make_request(prompt[:12], max_tokens=5, priority=1)
    for request in (*failing, waiting):
        engine.add(request)
    outcomes = run_until_done(engine)
    for request in failing:
        outcome = outcomes[request.request_id]
        assert outcome.finish_reason is FinishReason.ERROR and outcome.token_ids == []
        assert outcome.error is not None and outcome.error.kind is ErrorKind.ENGINE
    later = make_request(prompt, max_tokens=5)
    engine.add(later)
    outcomes |= run_until_done(engine)
    for request in (waiting, later):
        tokens = oracle_tokens(request, make_limits())[0]
        assert outcomes[request.request_id].token_ids == tokens
    assert engine.stats().num_finished == {"error": 2, "length": 2}


def test_the_engine_gives_up_after_three_failed_steps_in_a_row_not_before() -> None:
    """B62: an engine whose every step fails goes on for ever; or single failures add up to its
    end.
    """
    failures = {step: RuntimeError("broken") for step in (0, 1, 3, 4, 6, 7, 8)}
    engine = make_engine(FaultyExecutor(raise_in=failures))
    for number in range(9):
        engine.add(make_request(4, f"r{number}", max_tokens=3))
        if number < 8:
            engine.step()
            continue
        with pytest.raises(EngineFailed, match="broken"):
            engine.step()


def test_an_unusable_row_ends_its_request_alone() -> None:
    """B32: one row whose logits are not numbers ends the batch; or its blocks spoil later
    requests.
    """
    executor = FaultyExecutor(bad_rows=["bad"])
    engine = make_engine(executor, chunk_size=8)
    prompt = list(range(1, 18))
    good = make_request(9, max_tokens=6)
    engine.add(make_request(prompt, "bad"))
    engine.add(good)
    outcomes = run_until_done(engine)
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert "not numbers" in outcomes["bad"].error.message
    assert outcomes[good.request_id].token_ids == oracle_tokens(good, make_limits())[0]
    again = make_request(prompt, "again")
    engine.add(again)
    outcome = run_until_done(engine)["again"]
    assert outcome.num_cached_tokens == 0
    assert outcome.token_ids == oracle_tokens(again, make_limits())[0]


def test_a_row_without_token_or_error_is_an_error() -> None:
    """A request whose token got lost waits for ever."""
    scheduler = make_scheduler()
    scheduler.add(make_request(4, "r"), seed=0)
    (output,) = scheduler.update_from_output(scheduler.schedule(), ModelOutput({}))
    assert output.finish_reason is FinishReason.ERROR


def test_timings_and_counters_tell_what_happened() -> None:
    """B71: queue time, first token or counters are of another moment than they say."""
    engine = make_engine()
    clock = engine._clock
    engine.add(make_request(20, "r", max_tokens=2))
    clock.advance(0.5)

    class Slow(PagedFakeExecutor):
        def execute(self, output: SchedulerOutput) -> ModelOutput:
            clock.advance(0.25)
            return super().execute(output)

    engine._executor = Slow()
    timings = run_until_done(engine)["r"].last.timings
    assert (timings.queued_s, timings.first_token_s, timings.total_s) == (0.5, 1.25, 1.5)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (4, 20, 1)
    assert {step.execute_s for step in engine.step_log.steps} == {0.25}


def test_impossible_transitions_raise() -> None:
    """A request ends twice, or runs after its end, and nobody notices."""
    request = Request.arrive(make_request(), now=0.0, index=0, seed=0, max_num_tokens=9)
    with pytest.raises(IllegalTransition):
        request.transition(RequestStatus.PREEMPTED, 0.0)
    request.finish(FinishReason.ABORT, 0.0)
    for status in RequestStatus:
        with pytest.raises(IllegalTransition):
            request.transition(status, 0.0)


def test_an_empty_scheduler_makes_an_empty_step() -> None:
    """A step with nothing to do is a fault although nothing waits."""
    scheduler: Scheduler = make_scheduler()
    assert scheduler.schedule().scheduled == ()
    scheduler.check_integrity()
