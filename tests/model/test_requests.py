"""Requests from arrival to end, through the engine and a real model: what they ask for, and what is
wrong with them.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from sampling_checks import make_row, penalised
from tiny_models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Oracle,
    Run,
    assert_same,
    greedy,
    make_engine,
    make_executor,
    make_model,
    make_prompt,
    run,
)

from deployments.engine.engine import Engine
from deployments.execution.model_executor import ModelExecutor
from deployments.protocol import ErrorKind, FinishReason, GenerateRequest, RequestRefused

NUM_BLOCKS = 1 + 9
PROMPT = make_prompt(20)


@cache
def executor() -> ModelExecutor:
    return make_executor(make_model("llama"), num_blocks=NUM_BLOCKS)


@cache
def oracle() -> Oracle:
    return Oracle(make_model("llama"))


def sampled(request_id: str = "mine", **params) -> GenerateRequest:
    fields = {"max_tokens": 24, "temperature": 1.5, "priority": 1, **params}
    return greedy(PROMPT, request_id, **fields)


def preempted(request: GenerateRequest, steps: tuple[int, ...]) -> Run:
    """The request beside urgent ones that take its blocks, one at each of `steps`."""
    urgent = {step: greedy(make_prompt(50, step), f"urgent {step}", 2) for step in steps}

    def arrive(engine: Engine, step: int) -> None:
        if step in urgent:
            engine.add(urgent[step])

    result = run(executor(), [request], arrive, chunk_size=8)
    assert result.num_preemptions == len(steps)
    return result


# --- what a request asks for ----------------------------------------------------------------------

SAMPLING = {
    "temperature": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 12},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.6,
    },
    "greedy with penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
    },
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_seeded_text_is_the_same_however_it_is_run(params: dict) -> None:
    """B43, B44: alone, beside seeded and unseeded neighbours, twice at once, and through one to
    three preemptions (before its first token, in mid prefill, after some tokens) a seed gives
    one text, no token twice; penalties and min_tokens see its output as output throughout.
    """
    mine = sampled(seed=42, **params)
    alone = run(executor(), [mine]).tokens("mine")
    assert len(alone) >= 20
    neighbours = [
        greedy(make_prompt(5, i), f"other {i}", 6, temperature=1.0, seed=seed)
        for i, seed in enumerate((None, 42, 7))
    ]
    beside = run(executor(), [*neighbours, mine], chunk_size=7)
    assert beside.num_mixed_steps > 0
    assert beside.tokens("mine") == alone
    twice = run(executor(), [mine, sampled("twin", seed=42, **params)], max_num_seqs=2)
    assert twice.tokens("mine") == twice.tokens("twin") == alone
    for steps in ((1,), (2, 16), (1, 14, 40)):
        assert preempted(mine, steps).tokens("mine") == alone


def test_penalties_count_output_as_output_after_a_preemption() -> None:
    """B44: at each token of a preempted request, the penalties are those of its whole output so far
    and of nothing else: the text follows from the recorded logits by the plain formulas."""
    params = {"repetition_penalty": 1.2, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    mine = sampled(temperature=0.0, **params)
    for result in (run(executor(), [mine]), preempted(mine, (1, 14, 40)), preempted(mine, (20,))):
        text = result.tokens("mine")
        for index, logits in enumerate(result.logits["mine"]):
            history = make_row(PROMPT, text[:index], **params)
            assert text[index] == int(penalised(logits, history).argmax())


def test_penalties_change_the_text() -> None:
    """The text under penalties is not the plain one, and repeats itself less, so the test above is
    not vacuous.
    """
    plain = run(executor(), [sampled(seed=42)]).tokens("mine")
    texts = [run(executor(), [sampled(seed=42, **p)]).tokens("mine") for p in SAMPLING.values()]
    assert len({tuple(text) for text in texts}) == len(texts)
    strong = run(executor(), [sampled(seed=42, presence_penalty=2.0, frequency_penalty=2.0)])
    assert len(set(strong.tokens("mine"))) > len(set(plain))


def test_unseeded_requests_differ() -> None:
    """Without a seed each request draws its own."""
    result = run(executor(), [sampled("one"), sampled("two")], max_num_seqs=2)
    assert result.tokens("one") != result.tokens("two")


def test_greedy_rows_are_not_moved_by_hot_neighbours() -> None:
    """B76: a greedy request beside others at temperature 1.5 answers as generate does."""
    cold = greedy(PROMPT, "cold", 12)
    hot = [greedy(make_prompt(9, i), f"hot {i}", 12, temperature=1.5, top_p=0.9) for i in range(3)]
    result = run(executor(), [*hot, cold], chunk_size=7)
    assert_same(result, cold, oracle())


def test_endings() -> None:
    """B11: every eos id ends a text with reason stop; ignore_eos and min_tokens put it off; a stop
    token id is named.
    """
    text = oracle().answer(PROMPT, 12).token_ids
    first = [text.index(token) for token in text]
    # Two ends that the text reaches without having met them before.
    early, late = [index for index in range(2, 12) if first[index] == index][:2]
    ends = make_executor(
        make_model("llama"), num_blocks=NUM_BLOCKS, eos_token_ids=(text[late], text[early])
    )
    requests = [
        greedy(PROMPT, "plain", 12),
        greedy(PROMPT, "ignores", 12, ignore_eos=True),
        greedy(PROMPT, "stops", 12, ignore_eos=True, stop_token_ids=(text[late],)),
        greedy(PROMPT, "waits", 12, min_tokens=8),
        greedy(PROMPT, "waits for all", 12, min_tokens=12),
    ]
    result = run(ends, requests, max_num_seqs=8)
    seen = {name: outcome.last for name, outcome in result.outcomes.items()}
    assert result.tokens("plain") == text[: early + 1]
    assert (seen["plain"].finish_reason, seen["plain"].stop_token_id) == (FinishReason.STOP, None)
    assert result.tokens("ignores") == text
    assert seen["ignores"].finish_reason is FinishReason.LENGTH
    assert result.tokens("stops") == text[: late + 1]
    assert (seen["stops"].finish_reason, seen["stops"].stop_token_id) == (
        FinishReason.STOP,
        text[late],
    )
    assert len(result.tokens("waits")) >= 8
    assert not {text[early], text[late]} & set(result.tokens("waits")[:8])
    assert len(result.tokens("waits for all")) == 12
    assert not {text[early], text[late]} & set(result.tokens("waits for all"))


def test_logprobs_travel_with_their_tokens() -> None:
    """Each token comes with the raw log-probability it had, also through a preemption and beside
    others.
    """
    mine = sampled(seed=3, num_logprobs=4, max_tokens=12)
    result = preempted(mine, (10,))
    entries = []
    quiet = run(executor(), [mine])
    engine = make_engine(executor())
    engine.add(mine)
    while engine.has_requests:
        entries += [output.logprobs for output in engine.step() if output.token_id is not None]
    assert [entry.token_id for entry in entries] == result.tokens("mine") == quiet.tokens("mine")
    raw = torch.log_softmax(quiet.logits["mine"], dim=-1)
    for entry, row in zip(entries, raw, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )


# --- bad rows and bad requests --------------------------------------------------------------------


class SpoiledForward:
    """Turns the logits of one request into something unusable from its third token on."""

    def __init__(self, inner, request_id: str, value: float) -> None:
        self._inner = inner
        self._request_id = request_id
        self._value = value

    def run(self, scheduled):
        packed = self._inner.run(scheduled)
        for row, item in zip(packed.logits, packed.sampled, strict=True):
            if item.request.request_id == self._request_id and item.request.num_output_tokens >= 2:
                row[3] = self._value
        return packed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_ends_its_request_alone(value: float) -> None:
    """B32: a request whose logits become NaN ends with an error after the tokens it had; the
    others, in the same steps and after, answer as generate does.
    """
    faulty = make_executor(make_model("llama"), num_blocks=NUM_BLOCKS)
    faulty._forward = SpoiledForward(faulty._forward, "bad", value)
    sound = [greedy(make_prompt(n), f"{n} tokens", 8) for n in (5, 20)]
    bad = greedy(make_prompt(9), "bad", 8, num_logprobs=2)
    result = run(faulty, [sound[0], bad, sound[1]], chunk_size=8)
    for request in sound:
        assert_same(result, request, oracle())
    outcome = result.outcomes["bad"]
    assert outcome.finish_reason is FinishReason.ERROR
    assert outcome.error.kind is ErrorKind.ENGINE
    assert "not finite" in outcome.error.message
    assert outcome.token_ids == oracle().answer(make_prompt(9), 8).token_ids[:2]
    assert result.engine.stats().num_free_blocks == NUM_BLOCKS - 1


POOL_TOKENS = (NUM_BLOCKS - 1) * BLOCK_SIZE
BAD = {
    "empty": ((), {}, ErrorKind.INVALID, "prompt is empty"),
    "id beyond the vocabulary": ((1, VOCAB_SIZE), {}, ErrorKind.INVALID, f"less than {VOCAB_SIZE}"),
    "negative id": ((1, -1), {}, ErrorKind.INVALID, "outside the vocabulary"),
    "as long as the context": (
        make_prompt(MAX_MODEL_LEN),
        {},
        ErrorKind.CONTEXT_LENGTH,
        f"at most {MAX_MODEL_LEN - 1}",
    ),
    "larger than the pool": (
        make_prompt(POOL_TOKENS + 1),
        {},
        ErrorKind.CONTEXT_LENGTH,
        "raise cache.num_blocks",
    ),
    "as large as the pool": (make_prompt(POOL_TOKENS), {}, ErrorKind.CONTEXT_LENGTH, "KV cache"),
    "bias beyond the vocabulary": (
        (1, 2),
        {"logit_bias": ((VOCAB_SIZE, 1.0),)},
        ErrorKind.INVALID,
        "logit_bias",
    ),
    "stop beyond the vocabulary": (
        (1, 2),
        {"stop_token_ids": (VOCAB_SIZE,)},
        ErrorKind.INVALID,
        "stop_token_ids",
    ),
}


@pytest.mark.parametrize(("prompt", "params", "kind", "says"), BAD.values(), ids=BAD.keys())
def test_what_can_never_be_served_is_refused_and_others_go_on(
    prompt: tuple[int, ...], params: dict, kind: ErrorKind, says: str
) -> None:
    """A bad request is refused with what to change while others run, and they answer as generate
    does.
    """
    refusals: list[RequestRefused] = []

    def send_bad(engine: Engine, step: int) -> None:
        if step in (0, 2):
            with pytest.raises(RequestRefused, match=says) as refusal:
                engine.add(greedy(prompt, f"bad {step}", **params))
            refusals.append(refusal.value)

    sound = [greedy(make_prompt(n), f"{n} tokens", 6) for n in (5, 20)]
    result = run(executor(), sound, send_bad, chunk_size=7)
    assert [refusal.info.kind for refusal in refusals] == [kind, kind]
    for request in sound:
        assert_same(result, request, oracle())
    assert result.engine.stats().num_free_blocks == NUM_BLOCKS - 1


def test_extreme_parameters_harm_nobody() -> None:
    """Parameters at the ends of their ranges, and numbers too large for a tensor, are served beside
    others.
    """
    extremes = [
        {"temperature": 1e-300},
        {"top_k": 10**30, "temperature": 2.0},
        {"top_p": 1e-300, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"seed": 2**70, "temperature": 1.0},
        {"seed": -1, "temperature": 1.0, "top_p": 0.5},
        {"repetition_penalty": 0.01, "frequency_penalty": -2.0},
        {"repetition_penalty": 100.0, "logit_bias": tuple((i, 100.0) for i in range(VOCAB_SIZE))},
        {"num_logprobs": 20, "min_tokens": 4, "stop_token_ids": tuple(range(VOCAB_SIZE))},
    ]
    requests = [greedy(make_prompt(4, i), f"{i}", 4, **params) for i, params in enumerate(extremes)]
    cold = greedy(make_prompt(20), "cold", 6)
    result = run(executor(), [*requests, cold], max_num_seqs=8)
    assert_same(result, cold, oracle())
    for request in requests:
        outcome = result.outcomes[request.request_id]
        assert outcome.error is None
        assert len(outcome.token_ids) == 4
        assert all(0 <= token < VOCAB_SIZE for token in outcome.token_ids)


def test_the_last_token_that_fits_is_served() -> None:
    """A prompt one token short of the pool gives one token and ends by length."""
    request = greedy(make_prompt(POOL_TOKENS - 1), "long", 9)
    result = run(executor(), [request], chunk_size=16)
    assert result.outcomes["long"].finish_reason is FinishReason.LENGTH
    want = oracle().answer(request.prompt_token_ids, 2).token_ids
    assert result.tokens("long") == want[: len(result.tokens("long"))]
    assert len(result.tokens("long")) == 1
