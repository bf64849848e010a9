"""Log-probabilities of a prompt's own tokens, from the logits of its chunks.

The logits at a position speak of the token after it, so a chunk's last position speaks of a token
of the next chunk:

    prompt            p0    p1    p2    p3    p4 | sampled
    chunks           [          ][          ]
    logits at         0     1     2     3     4
    speak of          p1    p2    p3    p4    the output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deployments.engine.outputs import ModelOutput, ScheduledRequest
from deployments.execution.readback import read_back
from deployments.execution.token_logprobs import NUM_SLICE_ROWS, PendingLogprobs
from deployments.execution.upload import upload
from deployments.protocol import TokenLogprobs

NOT_FINITE = "the model returned logits that are not finite numbers for this request"


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions [start, stop) of a request whose logits its prompt's log-probabilities need."""

    row: ScheduledRequest
    start: int
    stop: int

    @classmethod
    def of(cls, row: ScheduledRequest) -> PromptSpan:
        """What a row computes of what its request still lacks; a preempted one lacks less."""
        request = row.request
        first_missing = request.num_prompt_tokens - request.num_missing_prompt_logprobs
        first = row.num_computed_tokens
        stop = min(first + row.num_scheduled_tokens, request.num_prompt_tokens - 1)
        return cls(row, max(first, first_missing - 1), stop)

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


def read_prompt_logprobs(logits: Tensor, spans: Sequence[PromptSpan]) -> ModelOutput:
    """The log-probabilities of `spans`, whose rows follow each other in `logits`
    [num_positions, vocab_size]; an error for each whose logits are not finite.
    """
    found: dict[str, list[TokenLogprobs]] = {}
    errors: dict[str, str] = {}
    end = 0
    for span in spans:
        begin, end = end, end + len(span)
        records = _read_span(logits[begin:end], span)
        if records is None:
            errors[span.row.request.request_id] = NOT_FINITE
        else:
            found[span.row.request.request_id] = records
    return ModelOutput({}, errors=errors, prompt_logprobs=found)


def _read_span(logits: Tensor, span: PromptSpan) -> list[TokenLogprobs] | None:
    """None if they are not finite."""
    request = span.row.request
    num_top = request.sampling_params.num_prompt_logprobs or 0
    records: list[TokenLogprobs] = []
    for offset in range(0, len(span), NUM_SLICE_ROWS):
        rows = logits[offset : offset + NUM_SLICE_ROWS].float()
        if not bool(torch.isfinite(rows.max(dim=-1).values).all()):
            return None
        first = span.start + offset + 1
        token_ids = request.token_ids[first : first + rows.shape[0]]
        [there] = upload([np.array(token_ids)], rows.device)
        records += PendingLogprobs(rows, there, num_top, read_back).wait(token_ids)
    return records
