"""Penalties for tokens that were there before, for all rows of a step that ask for any at once.

Owns the formulas; who asks for what is in the requests, and the order of edits is the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from deployments.engine.request import Request


def apply_penalties(scores: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> None:
    """Change `scores` [num_rows, vocab_size] at those of `rows` whose requests ask for penalties;
    `requests` are those of `rows`.

    Repetition is over prompt and output (Keskar et al., CTRL, section 4.1); presence and frequency
    over the output alone, as OpenAI defines them.
    """
    repeated = _Places.of(
        scores, rows, requests, lambda request: request.sampling_params.repetition_penalty, 1.0
    )
    if repeated is not None:
        # Of a token that occurs twice the same value is written twice.
        before, factor = repeated.read(scores), repeated.strengths
        repeated.write(scores, torch.where(before > 0, before / factor, before * factor))
    present = _Places.of(
        scores,
        rows,
        requests,
        lambda request: request.sampling_params.presence_penalty,
        0.0,
        is_output_alone=True,
    )
    if present is not None:
        present.write(scores, present.read(scores) - present.strengths)
    frequent = _Places.of(
        scores,
        rows,
        requests,
        lambda request: request.sampling_params.frequency_penalty,
        0.0,
        is_output_alone=True,
    )
    if frequent is not None:
        frequent.subtract_each(scores)


class _Places:
    """Where tokens of rows stand in a table of scores.

    Args:
        flat: [num_places], int64, row * vocab_size + token id, once for each time a token occurs.
        strengths: [num_places], of the penalty at each.
    """

    def __init__(self, flat: Tensor, strengths: Tensor) -> None:
        self._flat = flat
        self.strengths = strengths

    @classmethod
    def of(
        cls,
        scores: Tensor,
        rows: Sequence[int],
        requests: Sequence[Request],
        strength_of: Callable[[Request], float],
        harmless: float,
        is_output_alone: bool = False,
    ) -> _Places | None:
        """Those of the requests whose strength is not `harmless`; None if there are none."""
        flat: list[np.ndarray] = []
        strengths: list[float] = []
        for row, request in zip(rows, requests, strict=True):
            strength = strength_of(request)
            if strength != harmless:
                first = request.num_prompt_tokens if is_output_alone else 0
                token_ids = np.array(request.token_ids[first:], dtype=np.int64)
                flat.append(token_ids + row * scores.shape[1])
                strengths.append(strength)
        if not flat:
            return None
        times = torch.tensor([len(each) for each in flat])
        return cls(
            torch.from_numpy(np.concatenate(flat)).to(scores.device),
            torch.tensor(strengths, dtype=scores.dtype).repeat_interleave(times).to(scores.device),
        )

    def read(self, scores: Tensor) -> Tensor:
        """[num_places]"""
        return scores.view(-1).index_select(0, self._flat)

    def write(self, scores: Tensor, values: Tensor) -> None:
        """Put `values` [num_places] there; equal places get equal values."""
        scores.view(-1).index_copy_(0, self._flat, values)

    def subtract_each(self, scores: Tensor) -> None:
        """Take the strength away once for each time a token occurs."""
        scores.view(-1).index_add_(0, self._flat, self.strengths, alpha=-1)
