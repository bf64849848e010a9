"""Log-probabilities of tokens, sampled or given, under the model's own distribution.

All of a step are computed and begin their way to the host before anyone waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from deployments.engine.request import Request
from deployments.execution.readback import Readback
from deployments.execution.upload import upload
from deployments.protocol import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
NUM_SLICE_ROWS = 64
"""So many rows are widened to fp32 at once: of 150k tokens each, 40 MB."""


class PendingLogprobs:
    """Log-probabilities of one token for each of some rows, on the way to the host.

    Args:
        logits: [num_rows, vocab_size], at most `NUM_SLICE_ROWS`.
        token_ids: [num_rows], int64, on the same device.
        num_top: so many of the likeliest tokens come along.
        start_readback: begins to copy a tensor to the host.
    """

    def __init__(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_top: int,
        start_readback: Callable[[Tensor], Readback],
    ) -> None:
        logprobs = torch.log_softmax(logits.float(), dim=-1).clamp_min_(MIN_LOGPROB)
        top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        self._chosen = start_readback(logprobs.gather(1, token_ids[:, None])[:, 0])
        self._top_ids = start_readback(top.indices)
        self._top_values = start_readback(top.values)

    def wait(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """A record for each row; `token_ids` are the ones it was made with."""
        columns = (self._chosen.wait(), self._top_ids.wait(), self._top_values.wait())
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
            for token_id, logprob, ids, values in zip(token_ids, *columns, strict=True)
        ]


class StepLogprobs:
    """Those of a step's sampled tokens, for the requests that ask.

    Args:
        logits: [num_requests, vocab_size], as the model gave them.
        token_ids: [num_requests], int64.
        requests: whose rows these are.
        start_readback: begins to copy a tensor to the host.
    """

    def __init__(
        self,
        logits: Tensor,
        token_ids: Tensor,
        requests: Sequence[Request],
        start_readback: Callable[[Tensor], Readback],
    ) -> None:
        self._parts: list[tuple[list[int], PendingLogprobs]] = []
        for num_top, rows in _rows_that_ask(requests):
            [index] = upload([np.array(rows)], logits.device)
            # A row that is no numbers may have drawn a token beyond the vocabulary, and to read
            # there would be the end of a GPU's process.
            chosen = token_ids[index].clamp_(max=logits.shape[1] - 1)
            pending = PendingLogprobs(logits[index], chosen, num_top, start_readback)
            self._parts.append((rows, pending))

    def wait(self, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row; `token_ids` [num_requests] are the ones it was made with."""
        return {
            row: record
            for rows, pending in self._parts
            for row, record in zip(
                rows, pending.wait([token_ids[row] for row in rows]), strict=True
            )
        }


def _rows_that_ask(requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
    """Slices of rows that ask for as many of the likeliest tokens, after that number: among tokens
    that are equally likely another number may take others, and no row depends on its neighbours.
    """
    by_num_top: dict[int, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        if request.sampling_params.num_logprobs is not None:
            by_num_top[request.sampling_params.num_logprobs].append(row)
    for num_top, rows in by_num_top.items():
        for first in range(0, len(rows), NUM_SLICE_ROWS):
            yield num_top, rows[first : first + NUM_SLICE_ROWS]
