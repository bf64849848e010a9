"""Chooses the next token of each row of logits, all rows of a step at once.

Order for one row: logit_bias, penalties, min_tokens mask, grammar mask; then greedy, or
temperature, top_k, top_p, min_p and a draw. The grammar comes last, so that nothing outside it can
be chosen. A row's token depends on its own logits, parameters and history alone: the
random number is a hash of the request's seed and the index of the output token, so it is the same
beside any neighbours, after a preemption and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
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
from deployments.execution.penalties import apply_penalties
from deployments.execution.prompt_logprobs import MIN_LOGPROB, NOT_FINITE, token_logprobs
from deployments.execution.readback import Readback, read_back
from deployments.execution.truncated_draw import draw_tokens
from deployments.execution.upload import upload
from deployments.protocol import RequestRefused, SamplingParams, TokenLogprobs

__all__ = ["MIN_LOGPROB", "Sampler"]
_CACHED_BYTES = 2 * 2**20
_NO_GRAMMARS = NoGrammars("this engine has no structured output")


def _num_rows_at_once(logits: Tensor) -> int:
    """On a CPU as many rows as its cache holds while one operation follows another: a step of
    hundreds of rows reads memory once instead of once an operation. Elsewhere all.
    """
    if logits.device.type != "cpu":
        return len(logits)
    return max(1, _CACHED_BYTES // (4 * logits.shape[1]))


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
        start_readback: begins to copy a tensor to the host.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        grammars: GrammarCompiler = _NO_GRAMMARS,
        start_readback: Callable[[Tensor], Readback] = read_back,
    ) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._grammars = grammars
        self._read_back = start_readback

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> ModelOutput:
        """One token for each row of `logits` [num_requests, vocab_size].

        A row that is not finite, or whose grammar leaves nothing, gives its request an error and
        leaves the others alone.
        """
        found = ModelOutput({})
        num_rows = _num_rows_at_once(logits)
        for at in range(0, len(requests), num_rows):
            some = slice(at, at + num_rows)
            self._sample_some(logits[some], requests[some], found)
        return found

    def _sample_some(self, logits: Tensor, requests: Sequence[Request], found: ModelOutput) -> None:
        """Add what a few rows come to."""
        scores = logits.to(torch.float32, copy=True)
        best, token_ids = scores.max(dim=-1)
        is_finite = torch.isfinite(best)
        # Grammars are asked while a GPU is still at work; what else it is told follows behind it.
        errors: dict[int, str] = {}
        edited = self._edit(scores, requests, errors)
        if edited:
            [index] = upload([np.array(edited)], scores.device)
            best[index], token_ids[index] = scores[index].max(dim=-1)
        drawn = [
            row
            for row, request in enumerate(requests)
            if row not in errors and not request.sampling_params.is_greedy
        ]
        if len(drawn) == len(requests):
            token_ids = draw_tokens(scores, best, requests)
        elif drawn:
            [index] = upload([np.array(drawn)], scores.device)
            token_ids[index] = draw_tokens(
                scores[index], best[index], [requests[row] for row in drawn]
            )
        chosen, finite = self._read_back(torch.stack((token_ids, is_finite.long()))).wait()
        errors |= {row: NOT_FINITE for row, is_row in enumerate(finite) if not is_row}
        sound = [row for row in range(len(requests)) if row not in errors]
        found.token_ids.update({requests[row].request_id: chosen[row] for row in sound})
        found.logprobs.update(_logprobs(logits, requests, sound, chosen))
        found.errors.update({requests[row].request_id: text for row, text in errors.items()})

    def _edit(
        self, scores: Tensor, requests: Sequence[Request], errors: dict[int, str]
    ) -> list[int]:
        """Apply bias, penalties and masks to the rows of `scores` [num_requests, vocab_size] whose
        requests ask for any, and say which. A request whose grammar cannot go on joins `errors`
        instead.
        """
        edited: list[int] = []
        allowed_of: dict[int, Tensor | None] = {}
        for row, request in enumerate(requests):
            try:
                allowed = self._find_allowed(request, scores.device)
            except (GrammarStuck, RequestRefused) as error:
                errors[row] = f"the output cannot follow its grammar: {error}"
                continue
            if allowed is not None or _has_edits(request):
                edited.append(row)
                allowed_of[row] = allowed
                _apply_bias(scores[row], request.sampling_params)
        apply_penalties(scores, edited, [requests[row] for row in edited])
        for row in edited:
            self._mask_endings(scores[row], requests[row], allowed_of[row])
            _apply_grammar(scores[row], allowed_of[row])
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


def _apply_bias(logits: Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits.index_add_(
            0,
            torch.tensor(token_ids, device=logits.device),
            torch.tensor(biases, dtype=logits.dtype, device=logits.device),
        )


def _logprobs(
    logits: Tensor, requests: Sequence[Request], sound: Sequence[int], chosen: Sequence[int]
) -> dict[str, TokenLogprobs]:
    """Under the model's own distribution, of the requests that ask."""
    found: dict[str, TokenLogprobs] = {}
    for row in sound:
        request = requests[row]
        num_top = request.sampling_params.num_logprobs
        if num_top is not None:
            logprobs = torch.log_softmax(logits[row : row + 1].float(), dim=-1)
            [found[request.request_id]] = token_logprobs(logprobs, [chosen[row]], num_top)
    return found
