"""Edits of single tokens' logits: bias, penalties for tokens that were there before, and tokens
that must not come. For all rows of a step that ask for any at once; the host waits for nothing.

Owns the formulas; who asks for what is in the requests, and the order of edits is the sampler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.engine.request import Request
from deployments.execution.upload import upload


def apply_bias(scores: Tensor, requests: Mapping[int, Request]) -> None:
    """Add the logit_bias of the `requests` of these rows to `scores` [num_rows, vocab_size]."""
    biased = []
    for row, request in requests.items():
        if request.sampling_params.logit_bias:
            token_ids, biases = zip(*request.sampling_params.logit_bias, strict=True)
            biased.append(_Edit(row, token_ids, biases))
    if biased:
        _Places(scores, biased).add_each(1)


def apply_penalties(scores: Tensor, requests: Mapping[int, Request]) -> None:
    """Change `scores` [num_rows, vocab_size] as the `requests` of these rows ask for penalties.

    Repetition is over prompt and output (Keskar et al., CTRL, section 4.1); presence and frequency
    over the output alone, as OpenAI defines them.
    """
    repeated, present, frequent = [], [], []
    for row, request in requests.items():
        params = request.sampling_params
        output = request.token_ids[request.num_prompt_tokens :]
        if params.repetition_penalty != 1.0:
            repeated.append(_Edit(row, request.token_ids, params.repetition_penalty))
        if output and params.presence_penalty != 0.0:
            present.append(_Edit(row, output, params.presence_penalty))
        if output and params.frequency_penalty != 0.0:
            frequent.append(_Edit(row, output, params.frequency_penalty))
    if repeated:
        places = _Places(scores, repeated)
        before, factor = places.read(), places.strengths
        places.write(torch.where(before > 0, before / factor, before * factor))
    if present:
        places = _Places(scores, present)
        places.write(places.read() - places.strengths)
    if frequent:
        _Places(scores, frequent).add_each(-1)


def forbid(scores: Tensor, token_ids: Mapping[int, Sequence[int]]) -> None:
    """Rule tokens out in rows of `scores` [num_rows, vocab_size]."""
    if token_ids:
        minus_infinity = float("-inf")
        forbidden = [_Edit(row, ids, minus_infinity) for row, ids in token_ids.items()]
        places = _Places(scores, forbidden)
        places.write(places.strengths)


@dataclass(frozen=True, slots=True)
class _Edit:
    """What becomes of some tokens of a row."""

    row: int
    token_ids: Sequence[int]
    """One may occur several times."""
    strengths: float | Sequence[float]
    """Of all of them, or of each."""

    def find_places(self, vocab_size: int) -> NDArray[np.int64]:
        """In a table of rows that is read as one long row."""
        return np.array(self.token_ids, dtype=np.int64) + self.row * vocab_size

    def spread_strengths(self) -> NDArray[np.float32]:
        """One for each place."""
        return np.full(len(self.token_ids), self.strengths, dtype=np.float32)


class _Places:
    """Where edits touch a table of scores.

        row 0 [ . . . . . ]  row 1 [ . x . . x ]       tokens 1 and 4 of row 1 stand at the flat
        0               4    5               9         places 6 and 9

    Args:
        scores: [num_rows, vocab_size], fp32.
        edits: at least one.
    """

    def __init__(self, scores: Tensor, edits: Sequence[_Edit]) -> None:
        vocab_size, device = scores.shape[1], scores.device
        flat = np.concatenate([edit.find_places(vocab_size) for edit in edits])
        strengths = np.concatenate([edit.spread_strengths() for edit in edits])
        self._scores = scores.view(-1)
        [self._flat] = upload([flat], device)
        [self.strengths] = upload([strengths], device)
        """[num_places], one for each time a token occurs."""

    def read(self) -> Tensor:
        """[num_places]"""
        return self._scores.index_select(0, self._flat)

    def write(self, values: Tensor) -> None:
        """Put `values` [num_places] there; equal places get equal values."""
        self._scores.index_copy_(0, self._flat, values)

    def add_each(self, sign: int) -> None:
        """Add the strength, times `sign`, once for each time a token occurs."""
        self._scores.index_add_(0, self._flat, self.strengths, alpha=sign)
