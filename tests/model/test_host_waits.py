"""How often the host waits for a GPU in a step of the sampler, with a double in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from device_double import DoubleDevice, HostWaited
from sampling_checks import make_row, random_logits
from torch import Tensor

from deployments.engine.outputs import ModelOutput
from deployments.engine.request import Request
from deployments.execution.grammar import GrammarStuck
from deployments.execution.sampler import Sampler
from deployments.execution.truncated_draw import NUM_CANDIDATES
from deployments.protocol import Grammar

VOCAB_SIZE = 700
EOS = (5, 6)
ODD = torch.arange(VOCAB_SIZE) % 2 == 1
EOS_ALONE = torch.isin(torch.arange(VOCAB_SIZE), torch.tensor(EOS))
MASKS = {"odd": ODD, "end": EOS_ALONE}


class Masks:
    """Compiles each grammar to its mask of MASKS, whatever the text; any other is stuck."""

    def compile(self, grammar: Grammar) -> Masks:
        self._text = grammar.text
        return self

    def start(self) -> Mask:
        return Mask(self._text)


class Mask:
    def __init__(self, text: str) -> None:
        self._text = text

    def find_allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        if self._text not in MASKS:
            raise GrammarStuck("no token is left")
        return MASKS[self._text]


ODD_ONLY, ENDS, STUCK = (Grammar("regex", text) for text in ("odd", "end", "stuck"))
KINDS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 0.2, "top_p": 0.5},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "both": {"temperature": 0.2, "top_p": 0.7, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": -0.8},
    "bias": {"logit_bias": ((3, 4.0), (9, 100.0))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (7,)},
    "grammar": {"grammar": ODD_ONLY},
    "grammar, to go on": {"grammar": ODD_ONLY, "ignore_eos": True},
    "grammar, to end": {"grammar": ENDS, "min_tokens": 9},
    "grammar, stuck": {"grammar": STUCK},
    "logprobs": {"num_logprobs": 0},
    "top logprobs": {"num_logprobs": 5, "temperature": 1.0},
    "all": {
        "temperature": 0.2,
        "top_p": 0.5,
        "presence_penalty": 1.3,
        "repetition_penalty": 1.7,
        "logit_bias": ((3, 4.0),),
        "min_tokens": 9,
        "grammar": ODD_ONLY,
        "num_logprobs": 3,
    },
}
IN_DOUBT = {
    "top_p": {"top_p": 0.999},
    "min_p": {"min_p": 1e-6},
    "large top_k": {"top_k": NUM_CANDIDATES + 1, "top_p": 0.9},
}


def rows_of(params: dict[str, object], count: int = 3) -> list[Request]:
    return [make_row((1, 2, 3), (8, 8, 9), seed=seed, **params) for seed in range(count)]


def logits_of(requests: Sequence[Request]) -> Tensor:
    rows = [random_logits(VOCAB_SIZE, seed, spread=3.0) for seed in range(len(requests))]
    return torch.stack(rows)


def sample_on(device: DoubleDevice, logits: Tensor, requests: Sequence[Request]) -> ModelOutput:
    """What a step on the device comes to, which is what it comes to on a CPU."""
    sampler = Sampler(EOS, Masks(), start_readback=device.start_readback)
    with device.computing():
        got = sampler.sample(logits, requests)
    assert got == Sampler(EOS, Masks()).sample(logits, requests)
    assert len(got.token_ids) + len(got.errors) == len(requests)
    return got


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_a_step_waits_once_whatever_is_asked_of_it(params: dict[str, object]) -> None:
    """Each further wait leaves a GPU without work for as long as the host then takes to give it
    some; alone or beside others, every kind of request must do with the one at the end.
    """
    for requests in (rows_of(params), [*rows_of(params), *rows_of({})]):
        device = DoubleDevice()
        sample_on(device, logits_of(requests), requests)
        assert device.num_waits == 1


def test_a_step_of_all_kinds_waits_once() -> None:
    """As many kinds as a step holds are as many waits."""
    requests = [row for params in KINDS.values() for row in rows_of(params, 2)]
    device = DoubleDevice()
    got = sample_on(device, logits_of(requests), requests)
    assert device.num_waits == 1
    assert len(got.errors) == 2
    asked = [row for row in requests if row.sampling_params.num_logprobs is not None]
    assert len(got.logprobs) == len(asked) == 6


@pytest.mark.parametrize("cut", IN_DOUBT.values(), ids=IN_DOUBT.keys())
def test_rows_that_need_more_than_their_candidates_take_a_second_wait(
    cut: dict[str, float],
) -> None:
    """What was read before such rows are drawn again is their wrong token, with the
    log-probabilities of the wrong token; and a wait for each of them is one too many.
    """
    doubtful = rows_of({"temperature": 2.0, "num_logprobs": 2, **cut}, 6)
    requests = [*rows_of({}), *doubtful, *rows_of(KINDS["all"])]
    logits = logits_of(requests)
    device = DoubleDevice()
    got = sample_on(device, logits, requests)
    assert device.num_waits == 2
    candidates = logits.topk(NUM_CANDIDATES).indices.tolist()
    beyond = 0
    for row, request in enumerate(requests):
        token_id = got.token_ids[request.request_id]
        beyond += token_id not in candidates[row]
        if request.request_id in got.logprobs:
            entry = got.logprobs[request.request_id]
            want = torch.log_softmax(logits[row], dim=-1)[token_id]
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(float(want), abs=1e-5)
    if "min_p" in cut:
        assert beyond, "no token beyond the candidates was drawn, so nothing was shown"


def test_rows_that_are_not_finite_ask_for_no_second_wait() -> None:
    """They are no reason to wait, and their tokens, whatever they are, none to read elsewhere."""
    for params in KINDS.values():
        requests = rows_of({**params, "num_logprobs": 2})
        logits = logits_of(requests)
        logits[1] = float("nan")
        device = DoubleDevice()
        sampler = Sampler(EOS, Masks(), start_readback=device.start_readback)
        with device.computing():
            got = sampler.sample(logits, requests)
        assert requests[1].request_id in got.errors
        assert device.num_waits == 1


WAITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "tolist": lambda scores, mask: scores.tolist(),
    "item": lambda scores, mask: scores[0, 0].item(),
    "float": lambda scores, mask: float(scores.max()),
    "bool": lambda scores, mask: bool(mask.any()),
    "if": lambda scores, mask: 1 if mask.any() else 0,
    "equal": lambda scores, mask: torch.equal(scores, scores),
    "nonzero": lambda scores, mask: mask.nonzero(),
    "where": lambda scores, mask: torch.where(mask),
    "read by mask": lambda scores, mask: scores[mask],
    "write by mask": lambda scores, mask: scores.__setitem__(mask, 0.0),
    "read by list": lambda scores, mask: scores[[0, 1]],
    "write by list": lambda scores, mask: scores.__setitem__([0, 1], 0.0),
    "masked_select": lambda scores, mask: scores.masked_select(mask),
    "unique": lambda scores, mask: scores.unique(),
    "repeat": lambda scores, mask: scores.repeat_interleave(mask[0].long(), dim=0),
    "to": lambda scores, mask: scores.to(scores.device),
    "tensor": lambda scores, mask: torch.tensor([1, 2], device=scores.device),
}


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS.keys())
def test_the_double_sees_what_waits(call: Callable[[Tensor, Tensor], object]) -> None:
    """A double that overlooks a way to wait lets it into the sampler."""
    scores, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(HostWaited), DoubleDevice().computing():
        call(scores, mask)
    with DoubleDevice().computing():
        scores.masked_fill_(mask, 1.0)


def test_the_double_s_copies_land_in_their_order() -> None:
    """A copy that began later was waited for: the ones before it are there, and what began after
    it is not.
    """
    device = DoubleDevice()
    first, second, third = (device.start_readback(torch.tensor([n])) for n in (1, 2, 3))
    with device.computing():
        assert (second.wait(), first.wait(), device.num_waits) == ([2], [1], 1)
        assert (third.wait(), device.num_waits) == ([3], 2)
