"""Structured output through the engine and a real, random model: what comes out follows the
grammar, however the request was run, and nobody beside it notices.
"""

from __future__ import annotations

import gc
import json
import weakref
from functools import cache

import pytest
import torch
from grammar_tools import (
    FOLLOWS,
    GRAMMARS,
    JSON_SCHEMA,
    eos_token_ids,
    make_executor,
    text_of,
    tokenizer,
)
from tiny_models import WHOLE, Run, greedy, make_engine, make_prompt, run

from deployments.engine.engine import Engine
from deployments.execution.model_executor import ModelExecutor
from deployments.protocol import FinishReason, GenerateRequest, Grammar

PROMPT = make_prompt(20)
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "seed": 11},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 300, "min_p": 0.001, "seed": 5},
    "penalised": {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
}


@cache
def executor() -> ModelExecutor:
    return make_executor()


def constrained(grammar: Grammar, request_id: str = "mine", **params: object) -> GenerateRequest:
    return greedy(PROMPT, request_id, **{"max_tokens": 280, "grammar": grammar, **params})


def neighbours() -> list[GenerateRequest]:
    return [
        greedy(make_prompt(9, 1), "cold", 30, ignore_eos=True),
        greedy(make_prompt(30, 2), "hot", 30, temperature=1.5, seed=3, ignore_eos=True),
    ]


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_random_model_writes_what_the_grammar_says(kind: str, params: dict) -> None:
    """Whatever the model would like to write, the text follows the grammar, whole, and ends with
    reason stop.
    """
    seeds = range(6) if "seed" in params else (0,)
    requests = [
        greedy(make_prompt(12, seed), f"{seed}", 900, grammar=GRAMMARS[kind], **params)
        for seed in seeds
    ]
    result = run(executor(), requests, chunk_size=7)
    for request in requests:
        outcome = result.outcomes[request.request_id]
        assert outcome.finish_reason is FinishReason.STOP, outcome.error
        assert FOLLOWS[kind](text_of(outcome.token_ids))


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_the_text_is_the_same_however_it_is_run(kind: str, params: dict) -> None:
    """The grammar's state belongs to the text: neither the size of chunks, nor neighbours, nor one
    to three preemptions move it; and neighbours without a grammar get what they get alone.
    """
    mine = constrained(GRAMMARS[kind], **params)
    alone = run(executor(), [mine]).tokens("mine")
    assert FOLLOWS[kind](text_of(alone))
    for chunk_size in (1, 7, WHOLE):
        assert run(executor(), [mine], chunk_size=chunk_size).tokens("mine") == alone
    quiet = run(executor(), neighbours())
    twin = constrained(GRAMMARS[kind], "twin", **params)
    mixed = run(executor(), [*neighbours(), mine, twin], chunk_size=7)
    assert mixed.num_mixed_steps > 0
    assert mixed.tokens("mine") == mixed.tokens("twin") == alone
    for other in ("cold", "hot"):
        assert mixed.tokens(other) == quiet.tokens(other)
    for steps in ((1,), (2, 16), (1, 10, 22)):
        assert preempted(mine, steps).tokens("mine") == alone


@cache
def small_executor() -> ModelExecutor:
    return make_executor(num_blocks=1 + 40)


def preempted(request: GenerateRequest, steps: tuple[int, ...]) -> Run:
    """The request beside urgent ones that take its blocks, one at each of `steps`."""
    urgent = {step: greedy(make_prompt(300, step), f"urgent {step}", 2) for step in steps}
    late = GenerateRequest(
        request.request_id, request.prompt_token_ids, request.sampling_params, priority=1
    )

    def arrive(engine: Engine, step: int) -> None:
        if step in urgent:
            engine.add(urgent[step])

    result = run(small_executor(), [late], arrive, chunk_size=64, enable_prefix_caching=False)
    assert result.num_preemptions == len(steps)
    return result


def test_nothing_outside_the_grammar_can_be_chosen() -> None:
    """A bias of 100 on tokens the grammar forbids, and of -100 on all it allows, change nothing."""
    tokens = tokenizer()
    forbidden = tuple((tokens.token_to_id(char), 100.0) for char in "XYZ{}")
    hated = tuple((tokens.token_to_id(char), -100.0) for char in "01")
    for params in ({}, {"temperature": 2.0, "seed": 1}):
        request = constrained(Grammar("regex", "[01]{12}"), logit_bias=forbidden + hated, **params)
        text = text_of(run(executor(), [request]).tokens("mine"))
        assert len(text) == 12
        assert set(text) <= {"0", "1"}


def test_the_grammar_wins_over_min_tokens_and_ignore_eos() -> None:
    """A text that must end ends, whatever else the request says; one that may go on does, until
    the request allows it to end.
    """
    short, open_ended = Grammar("regex", "a{3}"), Grammar("regex", "a{3,}")
    for params in ({"min_tokens": 20}, {"ignore_eos": True}):
        outcome = run(executor(), [constrained(short, **params)]).outcomes["mine"]
        assert text_of(outcome.token_ids) == "aaa"
        assert outcome.finish_reason is FinishReason.STOP
    biased = {"logit_bias": tuple((token_id, 100.0) for token_id in eos_token_ids())}
    eager = constrained(open_ended, **biased)
    assert text_of(run(executor(), [eager]).tokens("mine")) == "aaa"
    patient = constrained(open_ended, min_tokens=9, **biased)
    assert text_of(run(executor(), [patient]).tokens("mine")) == "a" * 9
    endless = constrained(open_ended, max_tokens=15, ignore_eos=True, **biased)
    outcome = run(executor(), [endless]).outcomes["mine"]
    assert outcome.finish_reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == 15


def test_logprobs_stay_those_of_the_model() -> None:
    """B32: a mask is a rule of sampling; log-probabilities are the model's own, and finite."""
    mine = constrained(Grammar("choice", '["yes, but"]'), num_logprobs=3)
    engine, entries = make_engine(executor()), []
    engine.add(mine)
    while engine.has_requests:
        entries += [output.logprobs for output in engine.step() if output.token_id is not None]
    recorded = run(executor(), [mine])
    assert [entry.token_id for entry in entries] == recorded.tokens("mine")
    raw = torch.log_softmax(recorded.logits["mine"], dim=-1)
    for entry, row in zip(entries, raw, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_a_text_that_cannot_go_on_is_an_error_of_its_own() -> None:
    """A grammar that leads to characters the vocabulary lacks ends its request with an error that
    says so; the others go on.
    """
    stuck = constrained(Grammar("choice", '["aaaé"]'), "stuck")
    mine = constrained(JSON_SCHEMA)
    result = run(executor(), [stuck, mine])
    assert result.tokens("mine") == run(executor(), [mine]).tokens("mine")
    outcome = result.outcomes["stuck"]
    assert outcome.finish_reason is FinishReason.ERROR
    assert "grammar" in outcome.error.message
    assert result.engine.stats().num_free_blocks == executor().limits.num_blocks - 1


def test_a_state_goes_with_its_request() -> None:
    """B31: states of finished and aborted requests pile up in the sampler."""
    engine, states = make_engine(executor()), []
    for index in range(20):
        engine.add(constrained(JSON_SCHEMA, f"{index}"))
        for _ in range(3):
            engine.step()
        [request] = engine._scheduler._running
        states.append(weakref.ref(request.grammar_state))
        engine.abort(f"{index}")
        del request
    gc.collect()
    assert [state() for state in states] == [None] * 20


def test_json_object_is_any_object() -> None:
    """Each text of a random model under json_object is a JSON object, or was cut off by length."""
    requests = [
        constrained(Grammar("json_object", ""), f"{seed}", temperature=1.0, seed=seed)
        for seed in range(8)
    ]
    result = run(executor(), requests)
    ended = [
        outcome.token_ids
        for outcome in result.outcomes.values()
        if outcome.finish_reason is FinishReason.STOP
    ]
    assert ended
    assert all(isinstance(json.loads(text_of(token_ids)), dict) for token_ids in ended)
