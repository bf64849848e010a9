"""The way of sampled ids to the host: asked for once, after all else a step asks of the device."""

from __future__ import annotations

import torch
from device_double import DoubleDevice

from deployments.engine.request import Request
from deployments.execution.prompt_logprobs import NOT_FINITE
from deployments.execution.readback import read_back
from deployments.execution.sampler import Sampler
from deployments.protocol import SamplingParams


def make_request(row: int, **params: float) -> Request:
    return Request(f"r{row}", [1, 2], 2, SamplingParams(**params), row, 9, 0.0, row)  # type: ignore[arg-type]


PARAMS = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}]


def test_a_step_waits_once_for_greedy_and_drawn_rows() -> None:
    """Ids read before the copy has landed would be those of another step; a wait for each kind of
    row would stall the device each time.
    """
    device = DoubleDevice()
    requests = [make_request(row, **params) for row, params in enumerate(PARAMS)]
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(3))
    got = Sampler([0], start_readback=device.start_readback).sample(logits, requests)
    assert device.num_waits == 1
    assert got.token_ids == Sampler([0]).sample(logits, requests).token_ids
    assert len(got.token_ids) == 4


def test_rows_that_are_not_finite_are_drawn_from_without_harm() -> None:
    """Whether a row is finite is read with its id, so a draw meets NaN; an index beyond the row
    would end a GPU's process, and another row's token must not change.
    """
    for params in PARAMS:
        requests = [make_request(row, **params) for row in range(3)]
        logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(4))
        want = Sampler([0]).sample(logits, requests).token_ids
        for bad in (float("nan"), float("inf"), float("-inf")):
            broken = logits.clone()
            broken[1] = bad
            got = Sampler([0]).sample(broken, requests)
            assert got.errors == {"r1": NOT_FINITE}
            assert got.token_ids == {name: want[name] for name in ("r0", "r2")}


def test_what_is_on_the_host_is_not_copied() -> None:
    """On a CPU nothing is waited for, and nothing is pinned."""
    assert read_back(torch.tensor([[1, 2], [3, 4]])).wait() == [[1, 2], [3, 4]]
