"""Chooses the next token of each row of logits, all rows of a step at once.

Order for one row: logit_bias, penalties, min_tokens mask, grammar mask; then greedy, or
temperature, top_k, top_p, min_p and a draw. The grammar comes last, so that nothing outside it can
be chosen. A row's token depends on its own logits, parameters and history alone: the
random number is a hash of the request's seed and the index of the output token, so it is the same
beside any neighbours, after a preemption and after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from deployments.engine.outputs import ModelOutput
from deployments.engine.request import Request
from deployments.execution.grammar import (
    GrammarCompiler,
    GrammarMatcher,
    GrammarStuck,
    NoGrammars,
)
from deployments.execution.prompt_logprobs import MIN_LOGPROB, NOT_FINITE, token_logprobs
from deployments.execution.truncated_draw import draw_tokens
from deployments.protocol import RequestRefused, SamplingParams, TokenLogprobs

__all__ = ["MIN_LOGPROB", "Sampler"]
_NO_GRAMMARS = NoGrammars("this engine has no structured output")


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
        grammars: compiles the grammars of requests, or has them compiled already.
    """

    def __init__(
        self, eos_token_ids: Sequence[int], grammars: GrammarCompiler = _NO_GRAMMARS
    ) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._grammars = grammars

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> ModelOutput:
        """One token for each row of `logits` [num_requests, vocab_size].

        A row that is not finite, or whose grammar leaves nothing, gives its request an error and
        leaves the others alone.
        """
        if not requests:
            return ModelOutput({})
        logits = logits.float()
        best, token_ids = logits.max(dim=-1)
        finite = torch.isfinite(best).tolist()
        errors = {row: NOT_FINITE for row, is_finite in enumerate(finite) if not is_finite}
        edited = self._edit(logits, requests, errors)
        sound = [row for row in range(len(requests)) if row not in errors]
        chosen: list[int] = token_ids.tolist()
        for row, edited_row in edited.items():
            chosen[row] = int(edited_row.argmax())
        _draw(logits, edited, requests, sound, chosen)
        return ModelOutput(
            token_ids={requests[row].request_id: chosen[row] for row in sound},
            logprobs=_logprobs(logits, requests, sound, chosen),
            errors={requests[row].request_id: message for row, message in errors.items()},
        )

    def _edit(
        self, logits: Tensor, requests: Sequence[Request], errors: dict[int, str]
    ) -> dict[int, Tensor]:
        """Rows [vocab_size] with bias, penalties and masks applied, of the requests that ask for
        any. A request whose grammar cannot go on joins `errors` instead.
        """
        edited: dict[int, Tensor] = {}
        for row, request in enumerate(requests):
            if row in errors:
                continue
            try:
                allowed = self._find_allowed(request, logits.device)
            except (GrammarStuck, RequestRefused) as error:
                errors[row] = f"the output cannot follow its grammar: {error}"
                continue
            if allowed is not None or _has_edits(request):
                edited[row] = logits[row].clone()
                _apply_bias(edited[row], request.sampling_params)
                _apply_penalties(edited[row], request)
                self._mask_endings(edited[row], request, allowed)
                _apply_grammar(edited[row], allowed)
        return edited

    def _find_allowed(self, request: Request, device: torch.device) -> Tensor | None:
        """[vocab_size] bool, of a request with a grammar. The matcher is the request's own and
        reads all its output, so that nothing that happens to the request can part the two.
        """
        grammar = request.sampling_params.grammar
        if grammar is None:
            return None
        if request.grammar_state is None:
            request.grammar_state = self._grammars.compile(grammar).start()
        matcher = cast(GrammarMatcher, request.grammar_state)
        output = request.token_ids[request.num_prompt_tokens :]
        return matcher.find_allowed(output).to(device)

    def _mask_endings(self, logits: Tensor, request: Request, allowed: Tensor | None) -> None:
        """Keep a text from ending too early, unless all that its grammar leaves is to end."""
        params = request.sampling_params
        ending: set[int] = set()
        if request.num_output_tokens < params.min_tokens:
            ending = {*params.stop_token_ids, *self._eos_token_ids}
        elif allowed is not None and params.ignore_eos:
            ending = set(self._eos_token_ids)
        if not ending:
            return
        which = list(ending)
        num_left = logits.shape[0] if allowed is None else int(allowed.sum())
        num_ending = len(which) if allowed is None else int(allowed[which].sum())
        if num_ending < num_left:
            logits[which] = float("-inf")


def _apply_grammar(logits: Tensor, allowed: Tensor | None) -> None:
    if allowed is None:
        return
    logits[~allowed] = float("-inf")
    if not bool(torch.isfinite(logits.max())):
        logits[allowed] = 0.0  # the model rules out all that is allowed: any of it is as good


def _draw(
    logits: Tensor,
    edited: dict[int, Tensor],
    requests: Sequence[Request],
    sound: Sequence[int],
    chosen: list[int],
) -> None:
    rows = [row for row in sound if not requests[row].sampling_params.is_greedy]
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
    logits: Tensor, requests: Sequence[Request], sound: Sequence[int], chosen: Sequence[int]
) -> dict[str, TokenLogprobs]:
    """Under the model's own distribution, of the requests that ask."""
    found: dict[str, TokenLogprobs] = {}
    for row in sound:
        request = requests[row]
        num_top = request.sampling_params.num_logprobs
        if num_top is not None:
            logprobs = torch.log_softmax(logits[row : row + 1], dim=-1)
            [found[request.request_id]] = token_logprobs(logprobs, [chosen[row]], num_top)
    return found
