"""Draws tokens from rows of logits under temperature, top_k, top_p and min_p, without sorting the
vocabulary.

Where only a temperature is asked for, the draw is one inverse CDF over the whole row. Otherwise the
row's largest NUM_CANDIDATES logits are taken in order; they hold everything that may be drawn
unless top_p is not yet reached or top_k is larger, and only such rows are sorted whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deployments.engine.request import Request
from deployments.protocol import SamplingParams

NUM_CANDIDATES = 256
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smaller ones would be 0 in float32, and the best token's 0 / 0 no number."""
_MASK_64 = (1 << 64) - 1
_UNIFORM_BITS = 23
"""As many as fit a float32 below 1 exactly, so that a draw never lands on the far end of a CDF."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the index of the output token alone.

    Two rounds of SplitMix64's finaliser (Steele et al., OOPSLA'14) over both.
    """
    state = seed & _MASK_64
    for step in (index, 0x9E3779B97F4A7C15):
        state = (state + (step + 1) * 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return (state >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)


def draw_tokens(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token id for each row of `logits` [num_rows, vocab_size], fp32, none of them greedy."""
    device = logits.device
    params = [request.sampling_params for request in requests]
    temperatures = torch.tensor(
        [max(p.temperature, _MIN_TEMPERATURE) for p in params], device=device
    )
    # A temperature next to 0 must not overflow: what counts is each logit's distance from the best.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures[:, None]
    draws = torch.tensor([uniform(r.seed, r.num_output_tokens) for r in requests], device=device)
    chosen = torch.empty(len(requests), dtype=torch.int64, device=device)
    is_truncated = [p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params]
    plain = torch.tensor([i for i, cut in enumerate(is_truncated) if not cut], dtype=torch.int64)
    cut = torch.tensor([i for i, cut in enumerate(is_truncated) if cut], dtype=torch.int64)
    if len(plain):
        weights = torch.softmax(scaled[plain], dim=-1)
        chosen[plain] = _inverse_cdf(weights, draws[plain])
    if len(cut):
        chosen[cut] = _draw_truncated(scaled[cut], draws[cut], [requests[i] for i in cut.tolist()])
    return chosen.tolist()


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The index at which the running sum of `weights` [num_rows, n] passes the share `draws`
    [num_rows].
    """
    cdf = weights.cumsum(dim=-1)
    # Strictly above, so that an index of weight 0 is never taken.
    return torch.searchsorted(cdf, (draws * cdf[:, -1])[:, None], right=True)[:, 0]


def _draw_truncated(scaled: Tensor, draws: Tensor, requests: Sequence[Request]) -> Tensor:
    """[num_rows] token ids; `scaled` [num_rows, vocab_size] has the temperature in it."""
    vocab_size = scaled.shape[1]
    num_candidates = min(NUM_CANDIDATES, vocab_size)
    top, token_ids = scaled.topk(num_candidates, dim=-1)
    chosen = _draw_among(scaled, (top, token_ids), draws, requests)
    if num_candidates == vocab_size:
        return chosen
    covered = (torch.logsumexp(top, dim=-1) - torch.logsumexp(scaled, dim=-1)).exp().tolist()
    # Of the last candidate, relative to the best: whatever follows has less.
    last_shares = (top[:, -1] - top[:, 0]).exp().tolist()
    for row, request in enumerate(requests):
        if _needs_whole_row(request.sampling_params, covered[row], last_shares[row]):
            one = slice(row, row + 1)
            values, ids = scaled[one].sort(dim=-1, descending=True)
            chosen[one] = _draw_among(scaled[one], (values, ids), draws[one], requests[one])
    return chosen


def _needs_whole_row(params: SamplingParams, covered: float, last_share: float) -> bool:
    """Whether a token outside the candidates may be drawn, which hold the share `covered` of the
    row.
    """
    if 0 < params.top_k <= NUM_CANDIDATES:
        return False
    may_be_kept = last_share >= params.min_p
    if params.top_k > 0:
        # top_p of what a large top_k leaves cannot be told from the candidates alone.
        return may_be_kept or params.top_p < 1.0
    return may_be_kept and covered < params.top_p


def _draw_among(
    scaled: Tensor, candidates: tuple[Tensor, Tensor], draws: Tensor, requests: Sequence[Request]
) -> Tensor:
    """[num_rows] token ids out of each row's `candidates`: its largest values, in order, and their
    ids, both [num_rows, num_candidates].
    """
    device = scaled.device
    params = [request.sampling_params for request in requests]
    values, token_ids = candidates
    rank = torch.arange(values.shape[1], device=device)
    vocab_size = scaled.shape[1]
    # A top_k beyond the vocabulary is off, and may be too large for a tensor.
    top_k = torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device)
    top_k = top_k[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    # top_p is a share of what top_k leaves; without top_k, of the whole row.
    whole = torch.where(
        top_k[:, 0] < vocab_size,
        torch.logsumexp(values.masked_fill(rank >= top_k, float("-inf")), dim=-1),
        torch.logsumexp(scaled, dim=-1),
    )
    shares = (values - whole[:, None]).exp()
    before = shares.cumsum(dim=-1) - shares
    is_kept = (rank < top_k) & ((before < top_p) | (rank == 0)) & (shares >= min_p * shares[:, :1])
    index = _inverse_cdf(shares * is_kept, draws)
    return token_ids.gather(1, index[:, None])[:, 0]
