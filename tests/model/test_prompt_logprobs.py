"""Log-probabilities of the prompt, against one uncut forward of the model by its own attention."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from doubles import run_until_done
from tiny_models import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    WHOLE,
    greedy,
    make_engine,
    make_executor,
    make_model,
    make_prompt,
    run,
)
from torch import Tensor

from deployments.engine.engine import Engine
from deployments.engine.outputs import RequestOutput
from deployments.execution.model_executor import ModelExecutor
from deployments.protocol import ErrorKind, FinishReason, GenerateRequest

NUM_BLOCKS = 1 + 12
PROMPT = make_prompt(37)


@cache
def executor() -> ModelExecutor:
    return make_executor(make_model("llama"), num_blocks=NUM_BLOCKS)


@cache
def eager_logprobs(prompt: tuple[int, ...]) -> Tensor:
    """[num_prompt_tokens - 1, vocab_size]: row i speaks of token i + 1."""
    with torch.inference_mode():
        logits = make_model("llama")(input_ids=torch.tensor([prompt]), use_cache=False).logits
    return torch.log_softmax(logits[0, :-1].float(), dim=-1)


def asks(request_id: str = "mine", prompt: tuple[int, ...] = PROMPT, **params) -> GenerateRequest:
    return greedy(prompt, request_id, 6, **{"num_prompt_logprobs": 3, **params})


def outputs_of(engine: Engine, request_id: str, before_step=lambda step: None) -> list:
    """All outputs of one request, until nothing is left to do."""
    seen: list[RequestOutput] = []
    for step in range(500):
        before_step(step)
        if not engine.has_requests:
            return seen
        seen += [output for output in engine.step() if output.request_id == request_id]
        engine.check_integrity()
    raise AssertionError("requests are left")


def assert_right(outputs: list[RequestOutput], prompt: tuple[int, ...], num_top: int = 3) -> None:
    """With the first token and never again: one entry a prompt token, each as the model says."""
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (
        len(outputs) - 1
    )
    entries = outputs[0].prompt_logprobs
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == list(prompt[1:])
    for entry, row in zip(entries[1:], eager_logprobs(prompt), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert len(entry.top) == num_top
        for token_id, value in entry.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("chunk_size", [1, 7, BLOCK_SIZE, WHOLE])
@pytest.mark.parametrize("overlap_ratio", [0.0, 0.3])
def test_every_chunk_s_tokens_have_their_logprobs(chunk_size: int, overlap_ratio: float) -> None:
    """B30, B31: only the last chunk's are returned, or those at the border of two chunks are lost
    or come twice.
    """
    engine = make_engine(executor(), chunk_size=chunk_size, overlap_ratio=overlap_ratio)
    engine.add(asks())
    outputs = outputs_of(engine, "mine")
    assert_right(outputs, PROMPT)
    plain = run(executor(), [greedy(PROMPT, "plain", 6)]).tokens("plain")
    assert [output.token_id for output in outputs] == plain


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_alternatives_as_asked_for(num_top: int) -> None:
    """0 is the prompt token's own alone."""
    engine = make_engine(executor(), chunk_size=16)
    engine.add(asks(num_prompt_logprobs=num_top))
    assert_right(outputs_of(engine, "mine"), PROMPT, num_top)


def test_a_prompt_of_one_token_has_one_entry() -> None:
    """There is nothing before it to predict it from."""
    engine = make_engine(executor())
    engine.add(asks(prompt=(5,)))
    assert outputs_of(engine, "mine")[0].prompt_logprobs == [None]


def test_the_prefix_cache_hides_no_logprobs() -> None:
    """A prompt that is cached whole is computed again for who asks, and its blocks serve others
    still.
    """
    engine = make_engine(executor(), chunk_size=16)
    for request_id in ("first", "mine"):
        engine.add(asks(request_id))
        outputs = outputs_of(engine, request_id)
        assert_right(outputs, PROMPT)
        assert outputs[-1].num_cached_tokens == 0
    engine.add(greedy(PROMPT, "plain", 6))
    assert outputs_of(engine, "plain")[-1].num_cached_tokens == 32


@pytest.mark.parametrize("steps", [(1,), (2,), (1, 15), (9,)], ids=str)
def test_a_preemption_neither_loses_nor_doubles_any(steps: tuple[int, ...]) -> None:
    """B31: recomputed chunks add their tokens a second time; preempted in mid prefill, or when the
    text is on its way.
    """
    engine = make_engine(executor(), chunk_size=8)
    engine.add(dataclasses.replace(asks(), priority=1))

    def arrive(step: int) -> None:
        if step in steps:
            engine.add(greedy(make_prompt(80, step), f"urgent {step}", 2))

    outputs = outputs_of(engine, "mine", arrive)
    assert engine.step_log.num_preemptions == len(steps)
    assert_right(outputs, PROMPT)


def test_neighbours_notice_nothing() -> None:
    """Requests that ask and requests that do not share steps; each gets its own."""
    engine = make_engine(executor(), chunk_size=7)
    mine, other = asks("mine"), asks("other", make_prompt(21, 4))
    plain = greedy(make_prompt(11, 2), "plain", 6, num_logprobs=2)
    for request in (mine, plain, other):
        engine.add(request)
    seen: dict[str, list[RequestOutput]] = {"mine": [], "plain": [], "other": []}
    while engine.has_requests:
        for output in engine.step():
            seen[output.request_id].append(output)
    assert_right(seen["mine"], PROMPT)
    assert_right(seen["other"], other.prompt_token_ids)
    assert all(output.prompt_logprobs is None for output in seen["plain"])
    alone = run(executor(), [plain]).tokens("plain")
    assert [output.token_id for output in seen["plain"]] == alone


def test_an_abort_in_mid_prefill_leaves_nothing() -> None:
    """B31: what was gathered stays behind when the request goes; blocks do not, a thousand times
    over.
    """
    engine = make_engine(executor(), chunk_size=16)
    for index in range(100):
        engine.add(asks(f"{index}"))
        engine.step()
        [request] = engine._scheduler._running
        assert len(request.prompt_logprobs) == request.num_computed_tokens + 1 > 8
        engine.abort(f"{index}")
        engine.check_integrity()
    assert not engine.has_requests
    assert engine.stats().num_free_blocks == NUM_BLOCKS - 1


class SpoiledPrompt:
    """Turns the logits at one prompt position into no numbers."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def run(self, scheduled):
        packed = self._inner.run(scheduled)
        for span in packed.prompt_spans:
            if span.start <= 10 < span.stop:
                packed.prompt_logits[10 - span.start, 3] = float("nan")
        return packed


def test_a_prompt_whose_logits_are_no_numbers_ends_with_an_error() -> None:
    """B32: NaN must not reach the JSON of an answer; the chunk it is in ends the request, also
    where that chunk samples nothing, and alone.
    """
    faulty = make_executor(make_model("llama"), num_blocks=NUM_BLOCKS)
    faulty._forward = SpoiledPrompt(faulty._forward)
    for chunk_size in (8, WHOLE):
        engine = make_engine(faulty, chunk_size=chunk_size)
        engine.add(asks())
        engine.add(greedy(make_prompt(9), "sound", 4))
        outcomes = run_until_done(engine)
        assert outcomes["mine"].finish_reason is FinishReason.ERROR
        assert outcomes["mine"].error.kind is ErrorKind.ENGINE
        assert outcomes["mine"].token_ids == []
        assert outcomes["sound"].finish_reason is FinishReason.LENGTH


def test_logits_are_widened_a_slice_at_a_time(monkeypatch) -> None:
    """A long chunk's logits in fp32 at once are gigabytes for a large vocabulary."""
    rows: list[int] = []
    widen = Tensor.float

    def watched(tensor: Tensor, *args, **kwargs) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[1] == VOCAB_SIZE:
            rows.append(tensor.shape[0])
        return widen(tensor, *args, **kwargs)

    wide = make_executor(make_model("llama"), num_blocks=64)
    prompt = make_prompt(200, 3)
    engine = make_engine(wide, chunk_size=WHOLE)
    engine.add(asks(prompt=prompt))
    monkeypatch.setattr(Tensor, "float", watched)
    outputs = outputs_of(engine, "mine")
    monkeypatch.undo()
    assert max(rows) <= 64
    assert_right(outputs, prompt)
