"""Chooses the next token of each row of logits, all rows of a step at once.

Order for one row: logit_bias, penalties, min_tokens mask, grammar mask; then greedy, or
temperature, top_k, top_p, min_p and a draw. The grammar comes last, so that nothing outside it can
be chosen. A row's token depends on its own logits, parameters and history alone: the
random number is a hash of the request's seed and the index of the output token, so it is the same
beside any neighbours, after a preemption and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.engine.outputs import ModelOutput
from deployments.engine.request import Request
from deployments.execution.grammar import (
    GrammarCompiler,
    GrammarMatcher,
    GrammarStuck,
    NoGrammars,
)
from deployments.execution.penalties import apply_bias, apply_penalties, forbid
from deployments.execution.prompt_logprobs import NOT_FINITE
from deployments.execution.readback import Readback, read_back
from deployments.execution.token_logprobs import MIN_LOGPROB, StepLogprobs
from deployments.execution.truncated_draw import draw_tokens
from deployments.execution.upload import upload
from deployments.protocol import Grammar, RequestRefused, TokenLogprobs

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


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a few rows come to, on the host."""

    token_ids: Sequence[int]
    is_finite: Sequence[int]
    """Whether the row's logits were; what else is said of it is of no use if not."""
    logprobs: Mapping[int, TokenLogprobs]
    """By row, of those who ask."""


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
        """Add what a few rows come to. The host waits for the device once, or twice where draws
        turn out to need more than their candidates.
        """
        scores = logits.to(torch.float32, copy=True)
        best, token_ids = scores.max(dim=-1)
        is_finite = torch.isfinite(best)
        # Grammars are asked while a GPU is still at work; what else it is told follows behind it.
        errors: dict[int, str] = {}
        edited = self._edit(scores, requests, errors)
        if edited:
            [index] = upload([np.array(edited)], scores.device)
            best[index], token_ids[index] = scores[index].max(dim=-1)
        doubts = draw_tokens(scores, best, token_ids, requests, self._read_back)
        chosen = self._read(logits, token_ids, is_finite, requests)
        if doubts is not None and doubts.settle(token_ids):
            chosen = self._read(logits, token_ids, is_finite, requests)
        errors |= {row: NOT_FINITE for row, is_row in enumerate(chosen.is_finite) if not is_row}
        found.errors.update({requests[row].request_id: text for row, text in errors.items()})
        for row, request in enumerate(requests):
            if row not in errors:
                found.token_ids[request.request_id] = chosen.token_ids[row]
                if row in chosen.logprobs:
                    found.logprobs[request.request_id] = chosen.logprobs[row]

    def _read(
        self, logits: Tensor, token_ids: Tensor, is_finite: Tensor, requests: Sequence[Request]
    ) -> _Chosen:
        """Wait for what is chosen. Its copy begins last, so that all others of the step are here
        when it is, and waiting for them takes no time.
        """
        logprobs = StepLogprobs(logits, token_ids, requests, self._read_back)
        chosen, finite = self._read_back(torch.stack((token_ids, is_finite.long()))).wait()
        return _Chosen(chosen, finite, logprobs.wait(chosen))

    def _edit(
        self, scores: Tensor, requests: Sequence[Request], errors: dict[int, str]
    ) -> list[int]:
        """Apply bias, penalties and masks to the rows of `scores` [num_rows, vocab_size] whose
        requests ask for any, and say which. A request whose grammar cannot go on joins `errors`
        instead.
        """
        edited: dict[int, Request] = {}
        allowed: dict[int, NDArray[np.bool_]] = {}
        for row, request in enumerate(requests):
            try:
                if request.sampling_params.grammar is not None:
                    allowed[row] = self._find_allowed(request, request.sampling_params.grammar)
            except (GrammarStuck, RequestRefused) as error:
                errors[row] = f"the output cannot follow its grammar: {error}"
                continue
            if row in allowed or _has_edits(request):
                edited[row] = request
        if edited:
            apply_bias(scores, edited)
            apply_penalties(scores, edited)
            forbid(scores, self._find_endings(scores.shape[1], edited, allowed))
        if allowed:
            _apply_grammars(scores, allowed)
        return list(edited)

    def _find_allowed(self, request: Request, grammar: Grammar) -> NDArray[np.bool_]:
        """[vocab_size], on the host. The matcher is the request's own and reads all its output, so
        that nothing that happens to the request can part the two.
        """
        if request.grammar_state is None:
            request.grammar_state = self._grammars.compile(grammar).start()
        matcher = cast(GrammarMatcher, request.grammar_state)
        return matcher.find_allowed(request.token_ids[request.num_prompt_tokens :]).numpy()

    def _find_endings(
        self,
        vocab_size: int,
        requests: Mapping[int, Request],
        allowed: Mapping[int, NDArray[np.bool_]],
    ) -> dict[int, list[int]]:
        """By row, what would end a text too early, unless all that its grammar leaves is to end."""
        endings: dict[int, list[int]] = {}
        for row, request in requests.items():
            params = request.sampling_params
            ending: set[int] = set()
            if request.num_output_tokens < params.min_tokens:
                ending = {*params.stop_token_ids, *self._eos_token_ids}
            elif row in allowed and params.ignore_eos:
                ending = set(self._eos_token_ids)
            if not ending:
                continue
            left = allowed.get(row)
            num_left = vocab_size if left is None else left.sum()
            num_ending = len(ending) if left is None else left[list(ending)].sum()
            if num_ending < num_left:
                endings[row] = list(ending)
        return endings


def _apply_grammars(scores: Tensor, allowed: Mapping[int, NDArray[np.bool_]]) -> None:
    """Leave what is `allowed` [vocab_size] in these rows of `scores` [num_rows, vocab_size]."""
    [index] = upload([np.array(list(allowed))], scores.device)
    [is_allowed] = upload([np.stack(list(allowed.values()))], scores.device)
    masked = scores[index].masked_fill_(~is_allowed, float("-inf"))
    has_none = ~torch.isfinite(masked.amax(dim=-1, keepdim=True))
    # Where the model rules out all that is allowed, any of it is as good.
    scores[index] = masked.masked_fill_(is_allowed & has_none, 0.0)
