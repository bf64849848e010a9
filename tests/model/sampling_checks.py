"""Requests for a sampler alone, and plain full-sort formulas of what it must do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from deployments.engine.request import Request
from deployments.protocol import SamplingParams

_ids = count()


def make_row(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 0,
    **params: object,
) -> Request:
    """A request that has sampled `output` so far; greedy unless a temperature is given."""
    fields = {"temperature": 0.0, "max_tokens": 10_000, **params}
    number = next(_ids)
    return Request(
        request_id=f"row-{number}",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(**fields),  # type: ignore[arg-type]
        seed=seed,
        max_num_tokens=100_000,
        arrival_s=0.0,
        arrival_index=number,
    )


def at_index(index: int, seed: int = 0, **params: object) -> Request:
    """A request whose next output token has this index."""
    return make_row(output=[0] * index, seed=seed, **params)


def random_logits(vocab_size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    """[vocab_size]"""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab_size, generator=generator)


def distribution(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """[vocab_size] probabilities, float64, by sorting the whole row: temperature, top_k, top_p,
    min_p.
    """
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True, stable=True)
    weights = torch.softmax(scaled[order], dim=0)
    if top_k:
        weights[top_k:] = 0.0
    weights /= weights.sum()
    before = weights.cumsum(0) - weights
    keep = (before < top_p) & (weights > 0)
    keep[0] = True
    weights = weights * keep
    weights = weights * (weights >= min_p * weights[0])
    out = torch.zeros_like(scaled)
    out[order] = weights / weights.sum()
    return out


def penalised(logits: Tensor, request: Request) -> Tensor:
    """[vocab_size] logits after bias and penalties, one token at a time."""
    params = request.sampling_params
    output = request.token_ids[request.num_prompt_tokens :]
    values = logits.tolist()
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in range(len(values)):
        if token_id in request.token_ids:
            factor = params.repetition_penalty
            values[token_id] *= 1 / factor if values[token_id] > 0 else factor
        if token_id in output:
            values[token_id] -= params.presence_penalty
            values[token_id] -= params.frequency_penalty * output.count(token_id)
    return torch.tensor(values)


def assert_drawn_from(drawn: Sequence[int], want: Tensor) -> None:
    """Nothing outside the support was drawn, and the counts pass a chi-square test at about 5
    sigma.
    """
    counts = torch.bincount(torch.tensor(drawn), minlength=len(want)).double()
    assert counts.shape == want.shape, "a token outside the vocabulary was drawn"
    assert not bool(counts[want == 0].any()), "a token outside the support was drawn"
    expected = want * len(drawn)
    # Rare tokens count as one, as the test needs a few expected draws a class.
    common = expected >= 5.0
    got = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_square = float(((got - expected) ** 2 / expected.clamp_min(5.0)).sum())
    num_classes = len(expected)
    assert chi_square < num_classes + 5.0 * math.sqrt(2.0 * num_classes) + 5.0, chi_square
