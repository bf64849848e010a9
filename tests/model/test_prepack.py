"""Weights in another layout are the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tiny_models import Oracle, assert_same, greedy, make_executor, make_model, make_prompt, run
from torch import nn

from deployments.execution.compiled_linear import CompiledLinear, LinearKernel
from deployments.execution.prepack import (
    PrepackedLinear,
    multiplies_bfloat16,
    prepack_linears,
    restore_linears,
)

FORMS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    pytest.param(
        (torch.bfloat16, torch.bfloat16),
        marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no bfloat16"),
    ),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_prepacked_linear_is_the_linear(
    form: tuple[torch.dtype, torch.dtype], bias: bool
) -> None:
    """A reordered weight gives the same products, for any number of rows, none included."""
    dtype, packed_dtype = form
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype)
    packed = PrepackedLinear(layer, packed_dtype, None)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for shape in ((0, 24), (1, 24), (5, 24), (1, 1, 24), (1, 0, 24), (1, 7, 24), (24,)):
        x = torch.randn(shape, dtype=dtype)
        with torch.inference_mode():
            got, want = packed(x), layer(x)
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tied", [False, True])
def test_a_prepacked_model_answers_the_same(tied: bool) -> None:
    """With every linear layer prepacked, the head tied to the embedding or not, tokens and logits
    are still those of generate.
    """
    model = make_model("llama", tie_word_embeddings=tied)
    executor = make_executor(model)
    assert isinstance(model.lm_head, (CompiledLinear, PrepackedLinear))
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 30)]
    result = run(executor, requests, chunk_size=7)
    oracle = Oracle(make_model("llama", tie_word_embeddings=tied))
    for request in requests:
        assert_same(result, request, oracle)


def test_weights_stay_as_they_are_where_that_is_asked() -> None:
    """execution.prepack_weights false leaves every layer alone."""
    model = make_model("llama")
    make_executor(model, prepack_weights=False)
    assert type(model.lm_head) is nn.Linear


def test_copies_that_memory_does_not_hold_are_not_made() -> None:
    """Copies that would take more than half of what is free are not made: the KV cache needs it."""
    model = make_model("llama")
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    num_bytes = 4 * sum(layer.weight.numel() for layer in layers)
    assert prepack_linears(model, 2 * num_bytes - 1, None) == 0
    assert prepack_linears(model, 2 * num_bytes, None) == len(layers)
    assert prepack_linears(model, 2 * num_bytes, None) == 0


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no bfloat16")
@pytest.mark.parametrize(
    ("kernel_multiplies", "has_tiles", "expected"),
    [(True, False, CompiledLinear), (True, True, PrepackedLinear), (False, False, PrepackedLinear)],
)
def test_a_second_copy_is_made_only_where_onednn_is_faster(
    monkeypatch: pytest.MonkeyPatch, kernel_multiplies: bool, has_tiles: bool, expected: type
) -> None:
    """A CPU that multiplies bfloat16 in vectors has every layer once, by the compiled kernel; one
    with tiles, or whose instructions the kernel does not use, has oneDNN's copy too. It had both
    forms on every such CPU: twice the memory, and slower from 16 rows on.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    kernel = SimpleNamespace(multiplies_bfloat16=kernel_multiplies)
    model = make_model("llama").to(torch.bfloat16)
    assert prepack_linears(model, 1 << 30, cast(LinearKernel, kernel)) > 0
    assert type(model.lm_head) is expected


@pytest.mark.parametrize("compile_kernels", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_closing_gives_the_layers_back(tied: bool, compile_kernels: bool) -> None:
    """After `close` every layer is a plain one with the weight it had; a head that was tied to the
    embedding is tied again.
    """
    model = make_model("llama", tie_word_embeddings=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_executor(model, compile_kernels=compile_kernels).close()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_nothing_is_put_back_into_a_model_that_was_left_alone() -> None:
    """Plain layers stay the very same objects."""
    model = make_model("llama")
    head = model.lm_head
    restore_linears(model)
    assert model.lm_head is head
