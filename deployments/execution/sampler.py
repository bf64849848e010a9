"""Chooses the next token of each row of logits, all rows of a step at once.

Order for one row: logit_bias, penalties, min_tokens mask; then greedy, or temperature, top_k,
top_p, min_p and a draw. A row's token depends on its own logits, parameters and history alone: the
random number is a hash of the request's seed and the index of the output token, so it is the same
beside any neighbours, after a preemption and after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from deployments.engine.outputs import ModelOutput
from deployments.engine.request import Request
from deployments.execution.truncated_draw import draw_tokens
from deployments.protocol import SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
_NOT_FINITE = "the model returned logits that are not finite numbers for this request"


def _has_edits(request: Request) -> bool:
    params = request.sampling_params
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or request.num_output_tokens < params.min_tokens
    )


class Sampler:
    """Samples for requests of one model.

    Args:
        eos_token_ids: what ends a text; masked until min_tokens are out.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> ModelOutput:
        """One token for each row of `logits` [num_requests, vocab_size].

        A row that is not finite gives its request an error and leaves the others alone.
        """
        if not requests:
            return ModelOutput({})
        logits = logits.float()
        best, token_ids = logits.max(dim=-1)
        sound = torch.isfinite(best).tolist()
        edited = self._edit(logits, requests, sound)
        chosen: list[int] = token_ids.tolist()
        for row, edited_row in edited.items():
            chosen[row] = int(edited_row.argmax())
        self._draw(logits, edited, requests, sound, chosen)
        ids = [request.request_id for request in requests]
        return ModelOutput(
            token_ids={
                name: token for name, token, ok in zip(ids, chosen, sound, strict=True) if ok
            },
            logprobs=_logprobs(logits, requests, sound, chosen),
            errors={name: _NOT_FINITE for name, ok in zip(ids, sound, strict=True) if not ok},
        )

    def _edit(
        self, logits: Tensor, requests: Sequence[Request], sound: Sequence[bool]
    ) -> dict[int, Tensor]:
        """Rows [vocab_size] with bias, penalties and mask applied, of the requests that ask for
        any.
        """
        edited: dict[int, Tensor] = {}
        for row, request in enumerate(requests):
            if sound[row] and _has_edits(request):
                edited[row] = logits[row].clone()
                _apply_bias(edited[row], request.sampling_params)
                _apply_penalties(edited[row], request)
                self._apply_min_tokens(edited[row], request)
        return edited

    def _apply_min_tokens(self, logits: Tensor, request: Request) -> None:
        params = request.sampling_params
        if request.num_output_tokens < params.min_tokens:
            ending = [*params.stop_token_ids, *self._eos_token_ids]
            if len(set(ending)) < logits.shape[0]:
                logits[ending] = float("-inf")

    def _draw(
        self,
        logits: Tensor,
        edited: dict[int, Tensor],
        requests: Sequence[Request],
        sound: Sequence[bool],
        chosen: list[int],
    ) -> None:
        rows = [
            row
            for row, request in enumerate(requests)
            if sound[row] and not request.sampling_params.is_greedy
        ]
        if rows:
            of_rows = torch.stack([edited.get(row, logits[row]) for row in rows])
            drawn = draw_tokens(of_rows, [requests[row] for row in rows])
            for row, token_id in zip(rows, drawn, strict=True):
                chosen[row] = token_id


def _apply_bias(logits: Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(
            0,
            torch.tensor(token_ids, device=logits.device),
            torch.tensor(biases, dtype=logits.dtype, device=logits.device),
        )


def _apply_penalties(logits: Tensor, request: Request) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, section 4.1); presence and frequency
    over the output alone, as OpenAI defines them."""
    params = request.sampling_params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return
    counts = Counter(request.token_ids[request.num_prompt_tokens :])
    if counts:
        token_ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[token_ids] -= params.presence_penalty + params.frequency_penalty * times


def _logprobs(
    logits: Tensor, requests: Sequence[Request], sound: Sequence[bool], chosen: Sequence[int]
) -> dict[str, TokenLogprobs]:
    """Under the model's own distribution, of the requests that ask."""
    found: dict[str, TokenLogprobs] = {}
    for row, request in enumerate(requests):
        num_top = request.sampling_params.num_logprobs
        if num_top is None or not sound[row]:
            continue
        logprobs = torch.log_softmax(logits[row], dim=-1).clamp_min(MIN_LOGPROB)
        top = logprobs.topk(min(num_top, logprobs.shape[0]))
        found[request.request_id] = TokenLogprobs(
            token_id=chosen[row],
            logprob=float(logprobs[chosen[row]]),
            top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        )
    return found
