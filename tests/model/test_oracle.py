"""The net everything leans on: however steps are cut, tokens and logits are those of transformers'
`generate`.

The cases cover every chunk size, budget, overlap and cache setting with every family; which chunk
size meets which budget turns from family to family, so that over all families most pairs meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    MAX_MODEL_LEN,
    WHOLE,
    Oracle,
    assert_same,
    greedy,
    make_engine,
    make_executor,
    make_model,
    make_prompt,
    run,
)

from deployments.execution.model_executor import ModelExecutor

SIZES = (1, 7, BLOCK_SIZE, BLOCK_SIZE + 1, 64, WHOLE)
OVERLAPS = (0.0, 0.1, 0.2)
TIGHT_POOL = 1 + 9
"""Blocks: one long request and little more."""


@dataclass(frozen=True)
class Case:
    chunk_size: int
    budget: int
    overlap_ratio: float
    enable_prefix_caching: bool

    def __str__(self) -> str:
        cached = "cache" if self.enable_prefix_caching else "nocache"
        return f"c{self.chunk_size}-b{self.budget}-o{self.overlap_ratio}-{cached}"

    @property
    def settings(self) -> dict[str, object]:
        return {
            "chunk_size": self.chunk_size,
            "budget": self.budget,
            "overlap_ratio": self.overlap_ratio,
            "enable_prefix_caching": self.enable_prefix_caching,
        }


def cases_of(family: str) -> list[Case]:
    turn = list(FAMILIES).index(family)
    return [
        Case(
            chunk_size=size,
            budget=SIZES[(index + turn) % len(SIZES)],
            overlap_ratio=OVERLAPS[(index + turn) % len(OVERLAPS)],
            enable_prefix_caching=(index + turn // 2) % 2 == 0,
        )
        for index, size in enumerate(SIZES)
    ]


CASES = [
    pytest.param(family, case, id=f"{family}-{case}")
    for family in FAMILIES
    for case in cases_of(family)
]
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)


@cache
def oracle_of(family: str) -> Oracle:
    return Oracle(make_model(family))


@cache
def executor_of(family: str, num_blocks: int = 128) -> ModelExecutor:
    return make_executor(make_model(family), num_blocks=num_blocks)


def border_lengths(chunk_size: int) -> list[int]:
    """Prompt lengths around the ends of blocks and of chunks (B37)."""
    around = {k * BLOCK_SIZE + d for k in (1, 2) for d in (-1, 0, 1)}
    around |= {k * chunk_size + d for k in (1, 2, 3) for d in (-1, 0, 1)}
    return sorted(length for length in around if 0 < length <= 66)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_any_cut_of_any_length_answers_as_generate_does(family: str, case: Case) -> None:
    """Tokens and logits of prompts at k*B-1, k*B, k*B+1 and k*C-1, k*C, k*C+1, batched and cut by
    any chunk size, budget and overlap, equal `generate`.
    """
    lengths = border_lengths(case.chunk_size)
    requests = [greedy(make_prompt(n), f"{n} tokens", max_tokens=3 + n % 3) for n in lengths]
    result = run(executor_of(family), requests, **case.settings)
    for request in requests:
        assert_same(result, request, oracle_of(family))
    # Where a step has room beside a decode, some step must mix the two, or the case is vacuous.
    assert result.num_mixed_steps > 0 or case.budget == 1


@ALL_FAMILIES
def test_alone_and_mixed_answer_alike(family: str) -> None:
    """A request alone in each step answers as it does among decodes and chunks of others."""
    requests = [greedy(make_prompt(n), f"{n} tokens", max_tokens=6) for n in (1, 2, 13, 40)]
    mixed = run(executor_of(family), requests, chunk_size=7)
    assert mixed.num_mixed_steps > 0
    for request in requests:
        alone = run(executor_of(family), [request], chunk_size=7)
        assert alone.num_mixed_steps == 0
        assert_same(alone, request, oracle_of(family))
        assert_same(mixed, request, oracle_of(family))


@ALL_FAMILIES
@pytest.mark.parametrize("length", [4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 3])
def test_a_repeated_prompt_hits_the_cache_and_answers_the_same(family: str, length: int) -> None:
    """B38: the second of two equal prompts reads the first one's blocks, and its tokens and logits
    equal a run without cache; so does one that shares only the first half.
    """
    executor, oracle = executor_of(family), oracle_of(family)
    prompt = make_prompt(length)
    half = prompt[: 2 * BLOCK_SIZE] + make_prompt(9, variant=1)
    engine = make_engine(executor, chunk_size=9, overlap_ratio=0.2)
    first = greedy(prompt, "first")
    assert_same(run(executor, [first], engine=engine), first, oracle)
    later = [greedy(prompt, "second"), greedy(prompt, "third"), greedy(half, "half")]
    result = run(executor, later, engine=engine)
    for request in later:
        assert_same(result, request, oracle)
    # A prompt that is cached whole still computes its last block.
    cached = {name: outcome.num_cached_tokens for name, outcome in result.outcomes.items()}
    full = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached == {"second": full, "third": full, "half": 2 * BLOCK_SIZE}


@ALL_FAMILIES
def test_equal_prompts_at_once_answer_the_same(family: str) -> None:
    """B38: equal prompts that run side by side answer as one alone, whether or not one reads the
    other's blocks.
    """
    requests = [greedy(make_prompt(27), name) for name in ("one", "two", "three")]
    result = run(executor_of(family), requests, chunk_size=8, budget=9, max_num_seqs=3)
    for request in requests:
        assert_same(result, request, oracle_of(family))


@ALL_FAMILIES
@pytest.mark.parametrize("num_preemptions", [0, 1, 2, 3])
def test_preempted_requests_answer_as_if_nothing_had_happened(
    family: str, num_preemptions: int
) -> None:
    """B44: a request that loses its blocks before its first token, in mid prefill and after some
    tokens answers with the same tokens and logits, none twice.
    """
    turn = list(FAMILIES).index(family) + num_preemptions
    executor = executor_of(family, TIGHT_POOL)
    patient = greedy(make_prompt(30), "patient", max_tokens=16, priority=1)
    # Each needs more than the patient one leaves; none overlaps another, so each preempts once.
    arrivals = {2 + 14 * i: greedy(make_prompt(44 + i), f"urgent {i}", 2) for i in range(3)}
    arrivals = dict(list(arrivals.items())[:num_preemptions])

    def urgent_ones_arrive(engine, step: int) -> None:
        if step in arrivals:
            engine.add(arrivals[step])

    result = run(
        executor,
        [patient],
        urgent_ones_arrive,
        chunk_size=8,
        overlap_ratio=OVERLAPS[turn % 3],
        enable_prefix_caching=turn % 2 == 0,
    )
    assert result.num_preemptions == num_preemptions
    for request in (patient, *arrivals.values()):
        assert_same(result, request, oracle_of(family))


@ALL_FAMILIES
def test_decodes_that_outgrow_the_pool_preempt_and_answer_the_same(family: str) -> None:
    """Decodes that run out of blocks push each other out and still answer as `generate` does."""
    requests = [greedy(make_prompt(n), f"{n} tokens", max_tokens=20) for n in (15, 16, 17, 18)]
    result = run(executor_of(family, TIGHT_POOL), requests, chunk_size=7, budget=20)
    assert result.num_preemptions > 0
    for request in requests:
        assert_same(result, request, oracle_of(family))


@ALL_FAMILIES
def test_another_block_size_answers_the_same(family: str) -> None:
    """Blocks of one token and blocks larger than any prompt hold the same keys and values."""
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (1, 16, 33)]
    for block_size, num_blocks in ((1, 200), (3, 80), (MAX_MODEL_LEN, 6)):
        executor = make_executor(make_model(family), num_blocks=num_blocks, block_size=block_size)
        result = run(executor, requests, chunk_size=7)
        for request in requests:
            assert_same(result, request, oracle_of(family))


def test_the_reference_backend_answers_as_generate_does() -> None:
    """The specification of attention, run as a backend, answers as `generate` does."""
    for family in ("gemma2", "gpt_oss"):
        executor = make_executor(make_model(family), attention_backend="reference")
        requests = [greedy(make_prompt(n), f"{n} tokens", max_tokens=3) for n in (3, 20)]
        result = run(executor, requests, chunk_size=9)
        for request in requests:
            assert_same(result, request, oracle_of(family))
