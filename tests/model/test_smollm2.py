"""The default model itself, in fp32, against `generate`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_models import WHOLE, Oracle, assert_same, greedy, make_engine, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.config import CacheConfig, ExecutionConfig, ModelConfig, ServiceConfig
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_source import resolve_model_dir

BLOCK_SIZE = 16
TEXTS = (
    "Once upon a time",
    "The three primary colours are red, yellow and",
    "List the planets of the solar system in order of their distance from the sun, one a line, "
    "and say of each whether it has rings. Mercury, which has none, is the first; then come",
)
ATOL = 1e-3
"""Thirty layers in float32, logits of a spread of about 4."""


@cache
def smol() -> tuple[ModelExecutor, Oracle, list[tuple[int, ...]]]:
    directory = resolve_model_dir(ModelConfig())
    oracle = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    oracle.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = ServiceConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1 + 5),
        execution=ExecutionConfig(device="cpu", num_threads=1),
    )
    prompts = [tuple(tokenizer(text).input_ids) for text in TEXTS]
    return ModelExecutor.load(config), Oracle(oracle.eval()), prompts


@pytest.mark.parametrize(
    ("chunk_size", "budget", "overlap_ratio", "enable_prefix_caching"),
    [
        (1, BLOCK_SIZE + 1, 0.0, True),
        (7, BLOCK_SIZE, 0.2, False),
        (BLOCK_SIZE, 1, 0.1, True),
        (BLOCK_SIZE + 1, 64, 0.0, False),
        (64, WHOLE, 0.1, True),
        (WHOLE, 7, 0.2, False),
    ],
)
def test_the_default_model_answers_as_generate_does(
    chunk_size: int, budget: int, overlap_ratio: float, enable_prefix_caching: bool
) -> None:
    """SmolLM2 in fp32, cut and batched in any way, gives generate's tokens and logits."""
    executor, oracle, prompts = smol()
    requests = [greedy(prompt, f"{len(prompt)} tokens", max_tokens=4) for prompt in prompts]
    result = run(
        executor,
        requests,
        chunk_size=chunk_size,
        budget=budget,
        overlap_ratio=overlap_ratio,
        enable_prefix_caching=enable_prefix_caching,
    )
    for request in requests:
        assert_same(result, request, oracle, ATOL)


def test_the_default_model_survives_preemption_and_reads_its_cache() -> None:
    """SmolLM2 in fp32 gives generate's tokens and logits through a preemption and through a prefix
    hit.
    """
    executor, oracle, prompts = smol()
    long = prompts[2]
    assert 2 * BLOCK_SIZE < len(long) <= 3 * BLOCK_SIZE - 5, "each needs 3 of 5 blocks"
    patient = greedy(long, "patient", max_tokens=4, priority=1)
    urgent = greedy((*long[:5], *long), "urgent", max_tokens=2)
    engine = make_engine(executor, chunk_size=BLOCK_SIZE)

    def urgent_one_arrives(engine, step: int) -> None:
        if step == 3:
            engine.add(urgent)

    result = run(executor, [patient], urgent_one_arrives, engine=engine)
    assert result.num_preemptions == 1
    for request in (patient, urgent):
        assert_same(result, request, oracle, ATOL)
    again = greedy(long, "again", max_tokens=4)
    result = run(executor, [again], engine=engine)
    assert result.outcomes["again"].num_cached_tokens >= 2 * BLOCK_SIZE
    assert_same(result, again, oracle, ATOL)
