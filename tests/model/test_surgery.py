"""A model whose parts were replaced computes what it did, and gets its own parts back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_compiled_linear import needs_compiler
from tiny_models import FAMILIES, make_executor, make_model
from torch import Tensor, nn

from deployments.execution.fused_linear import FusedLinear, FusedPart
from deployments.execution.gated_mlp import GatedMlp, is_gated_mlp
from deployments.execution.norms import RmsNorm, find_formula
from deployments.execution.rotary import Rotation
from deployments.execution.small_ops import SmallOps, find_small_ops
from deployments.execution.surgery import operate, undo


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> SmallOps:
    found = find_small_ops(True, tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


def logits_of(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits
    return logits


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_and_gets_its_parts_back(family: str, ops: SmallOps) -> None:
    """Logits stay those of the model's own parts in every family, whichever of them it has; after
    `undo` its modules and weights are what they were.
    """
    model = make_model(family)
    kinds = {name: type(module) for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits_of(model)
    operate(model, lambda: logits_of(model), ops)
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=4e-5)
    undo(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits_of(model), before)


@needs_compiler
def test_what_can_be_replaced_is(ops: SmallOps) -> None:
    """A llama's norms, blocks, rotations and query, key and value, none of them left out."""
    model = make_model("llama", attention_bias=True)
    operate(model, lambda: logits_of(model), ops)
    layer = model.model.layers[1]
    assert isinstance(layer.self_attn.q_proj, FusedLinear)
    assert isinstance(layer.self_attn.v_proj, FusedPart)
    assert type(layer.self_attn.q_proj.linear) is nn.Linear
    assert isinstance(layer.mlp, GatedMlp)
    assert isinstance(layer.input_layernorm, RmsNorm) and isinstance(model.model.norm, RmsNorm)
    assert isinstance(
        layer.self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"], Rotation
    )


@needs_compiler
@pytest.mark.parametrize("dtype", SmallOps.dtypes, ids=str)
@pytest.mark.parametrize("rounds_first", [True, False])
def test_norm_and_gate_are_the_formulas(
    ops: SmallOps, dtype: torch.dtype, rounds_first: bool
) -> None:
    """Sizes that fill no vector, many rows and few, and numbers where the exponential ends."""
    torch.manual_seed(0)
    unit = 2e-6 if dtype is torch.float32 else 2**-7
    for size, rows in ((1, 1), (7, 3), (40, 5), (577, 100)):
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size)
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        wide = wide.to(dtype).float() if rounds_first else wide
        got = ops.rms_norm(x, weight, 1e-5, rounds_first)
        torch.testing.assert_close(got, (wide * weight).to(dtype), rtol=unit, atol=1e-5)
        both = (torch.randn(rows, 2 * size) * 30).to(dtype)
        want = nn.functional.silu(both[:, :size]) * both[:, size:]
        torch.testing.assert_close(ops.silu_gate(both), want, rtol=unit, atol=1e-6)
    extremes = torch.tensor([[200.0, -200.0, float("nan"), 1.0, 1.0, 1.0]])
    torch.testing.assert_close(ops.silu_gate(extremes)[0, :2], torch.tensor([200.0, 0.0]))
    assert ops.silu_gate(extremes)[0, 2].isnan()


def test_layers_alike_but_not_the_same_are_left_alone() -> None:
    """A layer norm is no RMS norm, and a block with another activation is not gated by SiLU, for
    all that their parts have the right names.
    """
    norm = nn.LayerNorm(8, bias=False)
    assert find_formula(norm) is None
    model = make_model("llama", hidden_act="gelu")
    assert not is_gated_mlp(model.model.layers[0].mlp)
    assert is_gated_mlp(make_model("llama").model.layers[0].mlp)


class Pair(nn.Module):
    """Two layers that one forward gives the same input, and another their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(other)], dim=-1)


def test_parts_that_are_asked_in_another_way_are_still_right() -> None:
    """The probe saw one input for both; with two, and with a bias that only one has, each layer
    still answers for its own.
    """
    torch.manual_seed(0)
    pair = Pair().requires_grad_(False)
    x, other = torch.randn(2, 6), torch.randn(2, 6)
    want = pair(x, x), pair(x, other)
    operate(pair, lambda: pair(x, x), None)
    assert isinstance(pair.right, FusedPart)
    for got, expected in zip((pair(x, x), pair(x, other)), want, strict=True):
        torch.testing.assert_close(got, expected)
    undo(pair)
    assert pair.left.bias is None and pair.right.bias is not None


class Picky(Pair):
    """Wants outputs whose rows lie one after the other."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.left(x).view(-1).sum() + self.right(other).sum()


def test_a_model_that_does_not_take_fused_layers_keeps_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A part is a view, which some code cannot take; the model is then left as it was, and the log
    says so.
    """
    model = Picky().requires_grad_(False)
    x = torch.randn(2, 6)
    operate(model, lambda: model(x, x), None)
    assert type(model.left) is nn.Linear and type(model.right) is nn.Linear
    assert "stay as they are" in caplog.text


def test_without_a_compiler_there_are_no_small_ops(tmp_path: Path) -> None:
    """A cache that cannot be made leaves the model's own operations in place."""
    (tmp_path / "file").write_text("")
    assert find_small_ops(True, tmp_path / "file" / "cache") is None
    assert find_small_ops(False, tmp_path) is None


@needs_compiler
def test_closing_an_executor_undoes_it() -> None:
    """`close` leaves a model as it came, every module of its own class."""
    model = make_model("qwen3")
    kinds = {name: type(module) for name, module in model.named_modules()}
    make_executor(model, compile_kernels=True).close()
    assert {name: type(module) for name, module in model.named_modules()} == kinds


@pytest.mark.parametrize("dtype", SmallOps.dtypes, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02])
def test_a_norm_that_takes_the_mean_away_is_no_rms_norm(dtype: torch.dtype, scale: float) -> None:
    """However small its weights are: beside one, their differences look like rounding."""
    norm = nn.LayerNorm(2048, bias=False).to(dtype)
    norm.weight.data.fill_(scale)
    assert find_formula(norm) is None


@pytest.mark.parametrize("dtype", SmallOps.dtypes, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02])
def test_an_rms_norm_is_found_whatever_its_weights(dtype: torch.dtype, scale: float) -> None:
    """A norm of real models, with weights far from one."""
    norm = make_model("llama").model.norm.to(dtype)
    torch.manual_seed(0)
    norm.weight.data = scale * torch.randn(2048).to(dtype)
    assert find_formula(norm) is not None


class Clamped(nn.Module):
    """A gated block that bounds what it multiplies."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(x)).clamp(max=self.limit)
        return self.down_proj(gate * self.up_proj(x).clamp(-self.limit, self.limit))


@pytest.mark.parametrize("limit", [7.0, 16.0])
def test_a_block_that_clamps_large_values_is_no_plain_one(limit: float) -> None:
    """Its clamp is not seen at inputs of the usual size, and would be dropped in silence."""
    assert not is_gated_mlp(Clamped(limit))
    assert is_gated_mlp(Clamped(float("inf")))


@needs_compiler
def test_a_model_that_fails_at_any_step_keeps_its_own_parts(ops: SmallOps) -> None:
    """What a model does with parts that are not its own raises anything; all of them go back."""
    model = make_model("llama")
    kinds = {name: type(module) for name, module in model.named_modules()}

    def fails() -> None:
        raise KeyError("a part that only this model has")

    operate(model, fails, ops)
    assert {name: type(module) for name, module in model.named_modules()} == kinds


@needs_compiler
def test_replaced_layers_still_tell_their_weights(ops: SmallOps) -> None:
    """Some models ask a layer for the dtype of its weight, and would not run any more."""
    model = make_model("llama")
    own = model.model.norm.weight
    operate(model, lambda: logits_of(model), ops)
    assert model.model.norm.weight is own
