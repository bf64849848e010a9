"""Quantised weights: what a code stands for, who multiplies it, and what becomes of a model."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compiled_linear import needs_compiler
from tiny_models import (
    Oracle,
    assert_same,
    greedy,
    make_executor,
    make_model,
    make_prompt,
    run,
)
from torch import Tensor, nn

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.load_gate import UnsupportedModel
from deployments.execution.native.compiler import compile_once
from deployments.execution.quantized import (
    CannotQuantize,
    QuantizedLinear,
    quantize_linears,
)
from deployments.execution.quantized_products import (
    CompiledProducts,
    Products,
    TorchProducts,
    choose_products,
)
from deployments.execution.quantized_weight import GROUP, quantize_weight


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Products:
    found = choose_products(torch.device("cpu"), True, tmp_path_factory.mktemp("kernels"))
    assert isinstance(found, CompiledProducts)
    return found


# --- what a code stands for -----------------------------------------------------------------------


@pytest.mark.parametrize("num_inputs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_weight_moves_by_at_most_half_a_step(num_bits: int, num_inputs: int) -> None:
    """A code is not the nearest there is, or belongs to another group's scale."""
    torch.manual_seed(0)
    weight = torch.randn(7, num_inputs) * torch.logspace(-4, 3, 7)[:, None] + 0.1
    quantized = quantize_weight(weight, num_bits)
    assert quantized.num_bits == num_bits
    # The ends of a group's range move by what rounding its scale and centre to bfloat16 takes.
    num_steps = 127 if num_bits == 8 else 16
    bound = quantized.scales.float() * (0.5 + num_steps * 2**-8)
    if quantized.centres is not None:
        bound = bound + quantized.centres.float().abs() * 2**-8
    bound = bound.repeat_interleave(GROUP, 1)[:, :num_inputs]
    assert bool(((quantized.dequantized() - weight).abs() <= bound).all())


@pytest.mark.parametrize("num_bits", [8, 4])
def test_zeros_and_equal_weights_stay(num_bits: int) -> None:
    """A group without a range is divided by nothing, or becomes numbers that are none."""
    weight = torch.tensor([0.0, 0.5, -0.5, 0.01, 0.3, -0.02])[:, None].expand(6, 64)
    quantized = quantize_weight(weight, num_bits).dequantized()
    assert (quantized[0] == 0).all()
    torch.testing.assert_close(quantized, weight, rtol=2**-8, atol=0.0)


def test_a_weight_of_four_bits_is_found_again() -> None:
    """Weights that stand on a grid of 4 bits, as those of a GGUF checkpoint do, move although they
    need not.
    """
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (5, 64))
    codes[:, 0::32], codes[:, 1::32] = 0, 15
    weight = (codes - 8) * 0.0078125 + 0.015625
    assert torch.equal(quantize_weight(weight, 4).dequantized(), weight)


def test_large_matrices_are_quantised_in_parts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in parts to save memory differs from what is done at once."""
    weight = torch.randn(50, 40)
    whole = quantize_weight(weight, 4).dequantized()
    monkeypatch.setattr("deployments.execution.quantized_weight._NUM_AT_ONCE", 120)
    assert torch.equal(quantize_weight(weight, 4).dequantized(), whole)


# --- products -------------------------------------------------------------------------------------


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_bits", [8, 4])
def test_both_products_are_those_of_the_weights_floats(
    compiled: Products, num_bits: int, dtype: torch.dtype
) -> None:
    """Any number of rows, inputs that fill no group or block, outputs that fill no panel, bias or
    none: a code is read from the wrong place, or a row goes into another's sums.
    """
    assert isinstance(compiled, CompiledProducts)
    torch.manual_seed(0)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for num_inputs in (1, 32, 33, 130, 288):
        for num_outputs in (1, 31, 32, 33, 96):
            quantized = quantize_weight(torch.randn(num_outputs, num_inputs), num_bits)
            bias = torch.randn(num_outputs).to(dtype) if num_outputs % 2 else None
            packed = [
                (products, products.pack(quantized)) for products in (TorchProducts(), compiled)
            ]
            for num_rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 33):
                x = torch.randn(num_rows, num_inputs).to(dtype)
                exact = _exact(x, quantized.dequantized(), bias)
                for products, weight in packed:
                    got = products.linear(x, weight, bias)
                    assert got.dtype is dtype
                    torch.testing.assert_close(got.double(), exact, rtol=unit, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_row_is_the_same_alone_and_in_any_company(compiled: Products, num_bits: int) -> None:
    """A row's sums depend, to the last bit, on how many rows or threads compute beside it, so that
    a request's text depends on who else is served.
    """
    torch.manual_seed(0)
    weight = compiled.pack(quantize_weight(torch.randn(70, 300), num_bits))
    x = torch.randn(600, 300)
    many = compiled.linear(x, weight, None)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 34), 509, 510, 511, 600):
            assert torch.equal(compiled.linear(x[:num_rows], weight, None), many[:num_rows])
    assert torch.equal(compiled.linear(x[5:6], weight, None), many[5:6])


@needs_compiler
def test_rows_that_are_no_numbers_spoil_nobody_else(compiled: Products) -> None:
    """What is no number in one row reaches another, or is rounded into a number."""
    weight = compiled.pack(quantize_weight(torch.ones(9, 40), 8))
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (3, 8):
            x = torch.ones(num_rows, 40, dtype=dtype)
            want = compiled.linear(x, weight, None)
            x[0, 0] = float("nan")
            out = compiled.linear(x, weight, None)
            assert out[0].isnan().all()
            assert torch.equal(out[1:], want[1:])


@needs_compiler
def test_rows_are_read_by_their_strides(compiled: Products) -> None:
    """A slice of a matrix is read as if its rows lay one after the other."""
    x = torch.randn(4, 64)
    weight = compiled.pack(quantize_weight(torch.randn(16, 32), 8))
    want = compiled.linear(x[:, ::2].contiguous(), weight, None)
    assert torch.equal(compiled.linear(x[:, ::2], weight, None), want)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_torch_multiplies_in_parts_alike(num_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the outputs is multiplied with another part's weights or bias."""
    products = TorchProducts()
    quantized = quantize_weight(torch.randn(50, 40), num_bits)
    x, bias = torch.randn(3, 40), torch.randn(50)
    monkeypatch.setattr("deployments.execution.quantized_products._NUM_AT_ONCE", 120)
    got = products.linear(x, products.pack(quantized), bias)
    want = _exact(x, quantized.dequantized(), bias)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@needs_compiler
def test_codes_of_four_bits_take_half_a_byte(compiled: Products) -> None:
    """Memory is what quantising is for: 8.5 and 5 bits a weight."""
    for products in (TorchProducts(), compiled):
        for num_bits, bits_a_weight in ((8, 8.5), (4, 5.0)):
            packed = products.pack(quantize_weight(torch.randn(64, 96), num_bits))
            assert packed.num_bytes * 8 == bits_a_weight * 64 * 96


def test_without_a_compiler_torch_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a compiler fails, or is silently slow."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        chosen = choose_products(torch.device("cpu"), True, tmp_path)
    assert isinstance(chosen, TorchProducts)
    assert "install g++ or set CXX" in caplog.text
    assert isinstance(choose_products(torch.device("cpu"), False, tmp_path), TorchProducts)
    assert isinstance(choose_products(torch.device("cuda"), True, tmp_path), TorchProducts)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are of x86")
@pytest.mark.parametrize("flag", ["-march=skylake-avx512", "-march=x86-64"])
def test_it_compiles_for_other_processors(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel compiles for wider and narrower vectors than this machine's."""
    monkeypatch.setattr("deployments.execution.native.compiler._native_flag", lambda: flag)
    source = Path(__file__).parents[2] / "deployments/execution/native/quantized_rows.cpp"
    assert compile_once(source, tmp_path).exists()


# --- models ---------------------------------------------------------------------------------------


class _Prepared:
    """A quantised executor beside generate of a model with the weights that the codes stand for."""

    def __init__(self, quantization: str, tied: bool, **execution: bool) -> None:
        settings = {"tie_word_embeddings": tied, "num_hidden_layers": 2}
        self.model = make_model("llama", **settings)
        self.executor = make_executor(self.model, quantization=quantization, **execution)
        twin = make_model("llama", **settings)
        for name, layer in list(twin.named_modules()):
            if type(layer) is nn.Linear:
                num_bits = self.model.get_submodule(name).weight_form.num_bits
                floats = quantize_weight(layer.weight, num_bits).dequantized()
                layer.weight = nn.Parameter(floats, requires_grad=False)
        self.oracle = Oracle(twin)


@cache
def _prepared(quantization: str, tied: bool, compiles: bool) -> _Prepared:
    return _Prepared(quantization, tied, compile_kernels=compiles)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=needs_compiler)])
def test_a_quantised_model_answers_as_its_weights_say(
    quantization: str, tied: bool, compiles: bool
) -> None:
    """Tokens or logits are not those of generate with the same weights as floats: alone or several
    at once, whole or in chunks, the head tied to the embedding or not.
    """
    prepared = _prepared(quantization, tied, compiles)
    assert isinstance(prepared.model.lm_head, QuantizedLinear)
    assert isinstance(prepared.model.get_input_embeddings(), nn.Embedding)
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 9, 30)]
    for batch in (requests[:1], requests):
        result = run(prepared.executor, batch, chunk_size=7)
        for request in batch:
            assert_same(result, request, prepared.oracle, atol=2e-4)


def test_the_head_and_layers_that_narrow_keep_eight_bits() -> None:
    """The head, or a layer with fewer outputs than inputs, falls to 4 bits."""
    model = _prepared("int4", True, False).model
    bits = {
        name.rsplit(".", 1)[-1]: module.weight_form.num_bits
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert bits == {
        "q_proj": 4,
        "o_proj": 4,
        "gate_proj": 4,
        "up_proj": 4,
        "k_proj": 8,
        "v_proj": 8,
        "down_proj": 8,
        "lm_head": 8,
    }


def test_closing_gives_a_tied_head_back_and_the_model_still_answers() -> None:
    """A closed executor leaves a model that cannot be called, or a head without its embedding."""
    model = make_model("llama", tie_word_embeddings=True)
    executor = make_executor(model, quantization="int8", compile_kernels=False)
    executor.close()
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    logits = model(input_ids=torch.tensor([make_prompt(5)])).logits
    assert logits.isfinite().all()


def test_an_untied_weight_is_given_up() -> None:
    """The weights that codes were made of stay in memory beside them."""
    model = make_model("llama", tie_word_embeddings=False)
    num_bytes = sum(p.nbytes for p in model.parameters())
    report = quantize_linears(model, "int8", TorchProducts())
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == report.num_layers == 3 * 7 + 1
    assert all(layer.kept_layer is None for layer in layers)
    assert sum(p.nbytes for p in model.parameters()) == report.num_other_bytes
    embeddings = model.get_input_embeddings().weight.nbytes
    assert report.num_bytes < embeddings + 0.4 * (num_bytes - embeddings)
    assert report.left == ()


def test_experts_in_one_parameter_stay_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Experts of three dimensions are quantised wrongly, or left without a word."""
    with caplog.at_level(logging.WARNING):
        executor = make_executor(make_model("gpt_oss"), quantization="int8", compile_kernels=False)
    assert "experts" in caplog.text and "stay as loaded" in caplog.text
    request = greedy(make_prompt(12), "one")
    assert len(run(executor, [request]).tokens("one")) == 5


def test_a_model_with_nothing_to_quantise_is_refused() -> None:
    """A model without linear layers is served as it is, although something else was asked for."""
    model = make_model("gpt2")
    model.lm_head = nn.Identity()
    with pytest.raises(CannotQuantize, match="set model.quantization to none"):
        quantize_linears(model, "int8", TorchProducts())


def test_a_weight_that_is_no_number_stays_as_it_is() -> None:
    """Infinities become a scale, and all of their group zero."""
    model = make_model("llama")
    model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    report = quantize_linears(model, "int8", TorchProducts())
    assert report.left == ("model.layers.0.mlp.up_proj.weight",)


def test_the_self_check_still_finds_a_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares a quantised model with itself as it was before, so that its tolerance
    must hide faults, or lets attention faults through.
    """
    right = CpuSdpaAttention.attend

    def wrong(self: CpuSdpaAttention, call: AttentionCall, *others: Any) -> Tensor:
        return right(self, replace(call, query=call.query.flip(1)), *others)

    monkeypatch.setattr(CpuSdpaAttention, "attend", wrong)
    with pytest.raises(UnsupportedModel, match="packed logits differ"):
        make_executor(make_model("llama"), quantization="int8", compile_kernels=False)


@needs_compiler
def test_tokens_are_the_same_in_any_company() -> None:
    """Quantised, run twice or beside others, a request gets other logits."""
    executor = _prepared("int8", True, True).executor
    requests = [greedy(make_prompt(n), f"{n} tokens", max_tokens=8) for n in (5, 9, 30)]
    first, second = run(executor, requests), run(executor, requests, chunk_size=7)
    for request in requests:
        assert first.tokens(request.request_id) == second.tokens(request.request_id)
    again = run(executor, requests)
    for name, logits in first.logits.items():
        assert torch.equal(again.logits[name], logits)
