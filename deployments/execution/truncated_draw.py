"""Draws tokens from rows of logits under temperature, top_k, top_p and min_p, without sorting the
vocabulary.

Each row goes the cheapest way that its own parameters allow, whatever its neighbours ask for:

    temperature alone     inverse CDF over the row, by blocks of its weights
    top_k                 its largest logits alone, in order
    top_p, min_p          its largest NUM_CANDIDATES logits and the sum of all weights; the row is
                          sorted whole only where a token beyond the candidates may be drawn,
                          which the host learns with the tokens of the step
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from deployments.engine.request import Request
from deployments.execution.readback import Readback
from deployments.execution.upload import upload
from deployments.protocol import SamplingParams

NUM_CANDIDATES = 256
_WHOLE_ROW = 0
"""Stands for the number of candidates of a row that is not cut."""
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smaller ones would be 0 in float32, and the best token's 0 / 0 no number."""
_BLOCK_SIZE = 256
"""Weights are summed by so many: a running sum of all is several times slower than sums of
blocks."""
_MASK_64 = (1 << 64) - 1
_UNIFORM_BITS = 23
"""As many as fit a float32 below 1 exactly, so that a draw never lands on the far end of a CDF."""
_BELOW_ONE = 1.0 - 2.0**-_UNIFORM_BITS


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float32]:
    """Numbers in [0, 1), float32, each of which depends on its seed and the index of its output
    token alone.

    Two rounds of SplitMix64's finaliser (Steele et al., OOPSLA'14) over both.
    """
    state = np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64)
    gamma = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    # Unsigned 64-bit arithmetic wraps around, as the algorithm wants it; numpy warns of it unless
    # both sides are arrays.
    for step in (np.array(indices, dtype=np.uint64), gamma):
        state = state + (step + np.uint64(1)) * gamma
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float32] = (state >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float32)
    numbers /= np.float32(1 << _UNIFORM_BITS)
    return numbers


def draw_tokens(
    logits: Tensor,
    best: Tensor,
    token_ids: Tensor,
    requests: Sequence[Request],
    start_readback: Callable[[Tensor], Readback],
) -> Doubts | None:
    """Put a drawn token in the place of the likeliest one, for each request that is not greedy.

    The host waits for nothing. Where candidates may turn out to be too few, the device finds out
    and the host is told by a copy that begins here; what is returned acts on it.

    Args:
        logits: [num_rows, vocab_size], fp32; used up.
        best: [num_rows], the largest logit of each row.
        token_ids: [num_rows], int64, a token of each row.
        requests: whose rows these are.
        start_readback: begins to copy a tensor to the host.
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        if not request.sampling_params.is_greedy:
            by_size[_num_candidates(request.sampling_params)].append(row)
    if not by_size:
        return None
    doubts = None
    rows = _Rows.of(logits, best, requests)
    for num_candidates, which in by_size.items():
        group, index = rows.pick(which)
        if num_candidates == _WHOLE_ROW:
            token_ids[index] = _inverse_cdf_by_blocks(group.tempered().exp_(), group.draws)
        elif all(_has_small_top_k(request.sampling_params) for request in group.requests):
            token_ids[index] = _draw_from_top(group, num_candidates)
        else:  # All such rows are of one size, so that there is one such group at most.
            token_ids[index], doubts = _draw_by_share(group, which, start_readback)
    return doubts


def _has_small_top_k(params: SamplingParams) -> bool:
    return 0 < params.top_k <= NUM_CANDIDATES


def _num_candidates(params: SamplingParams) -> int:
    """How many of its largest logits a row needs, by its own parameters alone: another number might
    round its sums in another way.
    """
    if _has_small_top_k(params):
        return max(16, 1 << (params.top_k - 1).bit_length())
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return NUM_CANDIDATES if is_cut else _WHOLE_ROW


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of logits and what they are drawn with."""

    requests: Sequence[Request]
    """Whose rows these are."""
    logits: Tensor
    """[num_rows, vocab_size], used up."""
    best: Tensor
    """[num_rows, 1], the largest logit of each."""
    temperatures: Tensor
    """[num_rows, 1], positive."""
    draws: Tensor
    """[num_rows], in [0, 1)."""

    @classmethod
    def of(cls, logits: Tensor, best: Tensor, requests: Sequence[Request]) -> _Rows:
        """With the temperatures and the random numbers of their requests; `best`: [num_rows]."""
        temperatures = [max(r.sampling_params.temperature, _MIN_TEMPERATURE) for r in requests]
        numbers = uniforms([r.seed for r in requests], [r.num_output_tokens for r in requests])
        tempers, draws = upload([np.array(temperatures, dtype=np.float32), numbers], logits.device)
        return cls(requests, logits, best[:, None], tempers[:, None], draws)

    def pick(self, which: Sequence[int]) -> tuple[_Rows, Tensor | slice]:
        """Copies of these rows, or all of them as they are; and what finds them in a step."""
        if len(which) == len(self.requests):
            return self, slice(None)
        [index] = upload([np.array(which)], self.logits.device)
        parts = (self.logits, self.best, self.temperatures, self.draws)
        requests = [self.requests[row] for row in which]
        return _Rows(requests, *(part[index] for part in parts)), index

    def tempered(self) -> Tensor:
        """[num_rows, vocab_size]: each logit's distance from the best, over the temperature; takes
        the place of the logits.
        """
        # The distance, so that a temperature next to 0 does not overflow.
        return self.logits.sub_(self.best).div_(self.temperatures)


class Doubts:
    """Rows of a step that were drawn among their candidates, where a token beyond these might have
    been drawn.

    Args:
        which: the rows of the step.
        rows: the same, tempered.
        whole: [num_rows], see `_draw_among`.
        flags: [num_rows], whether a row is in doubt, on the way to the host.
    """

    def __init__(self, which: Sequence[int], rows: _Rows, whole: Tensor, flags: Readback) -> None:
        self._which = which
        self._rows = rows
        self._whole = whole
        self._flags = flags

    def settle(self, token_ids: Tensor) -> bool:
        """Draw the rows in doubt again, out of all their tokens in order, and say whether there are
        any: what was read of the step's `token_ids` before is then out of date, and to read them
        again is a second wait. To call after a wait for what came after the draws, whose flags are
        then here.
        """
        is_doubtful = self._flags.wait()
        rows = self._rows
        for at in range(len(is_doubtful)):
            if is_doubtful[at]:
                one = slice(at, at + 1)
                in_order = rows.logits[one].sort(dim=-1, descending=True)
                token_ids[self._which[at]] = _draw_among(
                    (in_order.values, in_order.indices),
                    self._whole[one],
                    rows.draws[one],
                    rows.requests[one],
                )[0]
        return any(is_doubtful)


def _draw_from_top(rows: _Rows, num_candidates: int) -> Tensor:
    """[num_rows] token ids of rows whose top_k is within so many candidates."""
    vocab_size = rows.logits.shape[1]
    top, token_ids = rows.logits.topk(min(num_candidates, vocab_size), dim=-1)
    values = top.sub_(rows.best).div_(rows.temperatures)
    return _draw_among((values, token_ids), None, rows.draws, rows.requests)


def _draw_by_share(
    rows: _Rows, which: Sequence[int], start_readback: Callable[[Tensor], Readback]
) -> tuple[Tensor, Doubts | None]:
    """[num_rows] token ids of rows whose cut depends on all weights of the row, and what may be
    wrong with them; `which` are these rows of the step.
    """
    scaled = rows.tempered()
    num_candidates = min(NUM_CANDIDATES, scaled.shape[1])
    top, token_ids = scaled.topk(num_candidates, dim=-1)
    whole = _block_sums(scaled.exp()).sum(dim=-1).log()
    chosen = _draw_among((top, token_ids), whole, rows.draws, rows.requests)
    if num_candidates == scaled.shape[1]:
        return chosen, None
    covered = (torch.logsumexp(top, dim=-1) - whole).exp()
    # Of the last candidate, relative to the best: whatever follows has less.
    last_shares = (top[:, -1] - top[:, 0]).exp()
    bounds = np.array([_bounds_of_doubt(request.sampling_params) for request in rows.requests])
    least, limit = upload([bounds[:, 0], bounds[:, 1]], scaled.device)
    flags = (last_shares >= least) & (covered < limit)
    return chosen, Doubts(which, rows, whole, start_readback(flags))


def _bounds_of_doubt(params: SamplingParams) -> tuple[float, float]:
    """A token outside the candidates may be drawn if the last of them has at least the first of
    these as its share of the best one, and all together hold less than the second of the row.
    """
    if _has_small_top_k(params):
        return 0.0, 0.0
    if params.top_k > 0:
        # top_p of what a large top_k leaves cannot be told from the candidates alone.
        return (params.min_p if params.top_p == 1.0 else 0.0), math.inf
    return params.min_p, params.top_p


def _draw_among(
    candidates: tuple[Tensor, Tensor],
    whole: Tensor | None,
    draws: Tensor,
    requests: Sequence[Request],
) -> Tensor:
    """[num_rows] token ids out of each row's candidates.

    Args:
        candidates: the row's largest tempered values, in order, and their ids, both [num_rows,
            num_candidates].
        whole: [num_rows], logarithm of the sum of all weights of the row; None: every row has a
            top_k within its candidates.
        draws: [num_rows], in [0, 1).
        requests: whose rows these are.
    """
    values, token_ids = candidates
    params = [request.sampling_params for request in requests]
    num_values, device = values.shape[1], values.device
    rank = torch.arange(num_values, device=device)
    # A top_k beyond the candidates cuts nothing, and may be too large for a tensor.
    [top_k] = upload([np.array([[min(p.top_k, num_values) or num_values] for p in params])], device)
    shares_asked = np.array([[p.top_p, p.min_p] for p in params], dtype=np.float32)
    top_p, min_p = upload([shares_asked[:, :1], shares_asked[:, 1:]], device)
    # top_p is a share of what top_k leaves; without top_k, of the whole row.
    left = torch.logsumexp(values.masked_fill(rank >= top_k, float("-inf")), dim=-1)
    if whole is not None:
        [has_top_k] = upload([np.array([p.top_k > 0 for p in params])], device)
        left = torch.where(has_top_k, left, whole)
    shares = (values - left[:, None]).exp()
    before = shares.cumsum(dim=-1) - shares
    is_kept = (rank < top_k) & ((before < top_p) | (rank == 0)) & (shares >= min_p * shares[:, :1])
    index = _inverse_cdf(shares * is_kept, draws)
    return token_ids.gather(1, index[:, None])[:, 0]


# --- sums of weights ------------------------------------------------------------------------------


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The index at which the running sum of `weights` [num_rows, n] passes the share `draws`
    [num_rows]; any index where they are not numbers.
    """
    return _search(weights.cumsum(dim=-1), draws)[:, 0]


def _search(cdf: Tensor, draws: Tensor) -> Tensor:
    """[num_rows, 1]: where running sums [num_rows, n] pass the shares `draws` [num_rows]."""
    # Strictly above, so that an index of weight 0 is never taken.
    found = torch.searchsorted(cdf, (draws * cdf[:, -1])[:, None], right=True)
    # No sum passes NaN, and reading beyond the end would be the end of a GPU's process.
    return found.clamp_(max=cdf.shape[1] - 1)


def _inverse_cdf_by_blocks(weights: Tensor, draws: Tensor) -> Tensor:
    """The same for long rows: first the block, then the place in it.

    weights   [ . . . . | . . . . | . . . . ]
    sums           3    |    5    |    2           a draw of 0.6: 6 of 10, so block 1, and there
                             ^ 3 of 5              the share (6 - 3) / 5
    """
    sums = _block_sums(weights)
    cdf = sums.cumsum(dim=-1)
    target = (draws * cdf[:, -1])[:, None]
    block = _search(cdf, draws)
    before = cdf.gather(1, block) - sums.gather(1, block)
    # Two ways to sum differ in the last bit, which must lead neither below the block nor beyond it.
    share = ((target - before) / sums.gather(1, block)).clamp_(0.0, _BELOW_ONE)[:, 0]
    blocks = _in_blocks(weights)
    rows = torch.arange(len(weights), device=weights.device)
    return block[:, 0] * _BLOCK_SIZE + _inverse_cdf(blocks[rows, block[:, 0]], share)


def _block_sums(weights: Tensor) -> Tensor:
    """[num_rows, num_blocks]"""
    return _in_blocks(weights).sum(dim=-1)


def _in_blocks(weights: Tensor) -> Tensor:
    """[num_rows, num_blocks, _BLOCK_SIZE]: the last block filled up with weights of 0."""
    num_missing = -weights.shape[1] % _BLOCK_SIZE
    if num_missing:
        weights = pad(weights, (0, num_missing))
    return weights.view(len(weights), -1, _BLOCK_SIZE)
