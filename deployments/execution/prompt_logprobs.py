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

import torch
from torch import Tensor

from deployments.engine.outputs import ModelOutput, ScheduledRequest
from deployments.protocol import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
NOT_FINITE = "the model returned logits that are not finite numbers for this request"
_NUM_SLICE_ROWS = 64
"""So many rows are widened to fp32 at once: of 150k tokens each, 40 MB."""


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


def token_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Records of `token_ids`, one for each row of `logprobs` [num_rows, vocab_size], fp32."""
    logprobs = logprobs.clamp_min(MIN_LOGPROB)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])[:, 0]
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]


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
    for offset in range(0, len(span), _NUM_SLICE_ROWS):
        rows = logits[offset : offset + _NUM_SLICE_ROWS].float()
        if not bool(torch.isfinite(rows.max(dim=-1).values).all()):
            return None
        first = span.start + offset + 1
        token_ids = request.token_ids[first : first + rows.shape[0]]
        records += token_logprobs(torch.log_softmax(rows, dim=-1), token_ids, num_top)
    return records
