"""RMS norms of a model, each as one compiled operation.

Which modules are such norms is tried, not known: a module with one weight that answers random
inputs as a formula does is that formula. Model files differ in the formula's rounding and in
whether the weight is added to one:

    llama     (x / rms).to(dtype) * weight
    gpt_oss   (x / rms * weight).to(dtype)
    gemma     (x / rms * (1 + weight)).to(dtype)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deployments.execution.small_ops import SmallOps

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_SCALES = (1.0, 1e-3, 300.0)
"""Of the inputs tried: where epsilon does not matter, and where it does."""


class RmsNorm(nn.Module):
    """An RMS norm; inference only.

    Args:
        norm: the model's own, kept.
        formula: that of `norm`.
    """

    def __init__(self, norm: nn.Module, formula: NormFormula, ops: SmallOps) -> None:
        super().__init__()
        # In a list, since it is no part of this module: nobody is to find it in the model.
        self._norm = [norm]
        self._formula = formula
        self._ops = ops

    @property
    def norm(self) -> nn.Module:
        """The module this stands for."""
        return self._norm[0]

    @property
    def weight(self) -> Tensor:
        """That of the model's own, which some models ask for its dtype."""
        return self._norm[0].get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        formula = self._formula
        return self._ops.rms_norm(x, formula.weight, formula.epsilon, formula.rounds_first)


@dataclass(frozen=True, slots=True)
class NormFormula:
    """How a norm computes."""

    weight: Tensor
    """[size], float32, what the normed input is multiplied by"""
    epsilon: float
    rounds_first: bool

    def apply(self, x: Tensor) -> Tensor:
        """The norm of `x` [..., size] by torch, in its dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        normed = normed.to(x.dtype).float() if self.rounds_first else normed
        return (normed * self.weight).to(x.dtype)


def find_formula(module: nn.Module) -> NormFormula | None:
    """The formula of an RMS norm, None if this module is something else."""
    parameters = dict(module.named_parameters())
    epsilons = [getattr(module, name) for name in _EPSILON_NAMES if hasattr(module, name)]
    weight = parameters.get("weight")
    if list(parameters) != ["weight"] or weight is None or weight.dim() != 1 or not epsilons:
        return None
    if weight.dtype not in SmallOps.dtypes or not isinstance(epsilons[0], float):
        return None
    size = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(len(_SCALES), 4, size, generator=generator)
    # One input lies off zero, so that a norm that takes the mean away cannot be taken for one.
    random[0] += 1.0
    x = (random * torch.tensor(_SCALES)[:, None, None]).to(weight.dtype)
    try:
        with torch.inference_mode():
            answer = module(x)
    except Exception:  # it takes other inputs, whatever it says of these
        return None
    if not isinstance(answer, Tensor) or answer.shape != x.shape or answer.dtype != x.dtype:
        return None
    wide = weight.detach().float()
    formulas = [
        NormFormula(factor, epsilons[0], rounds_first)
        for factor, rounds_first in itertools.product((wide, 1.0 + wide), (True, False))
    ]
    worst, best = min(
        (_distance(formula.apply(x), answer), index) for index, formula in enumerate(formulas)
    )
    # float32's formulas agree to a rounding or two; in bfloat16 the right one agrees bit by bit but
    # for values that lie between two numbers, and take one or the other.
    tolerance = 1e-5 if weight.dtype is torch.float32 else 2**-7
    return formulas[best] if worst <= tolerance else None


def _distance(got: Tensor, want: Tensor) -> float:
    """The largest difference, beside the value or what is usual in its row if that is larger: small
    weights must not make it small.
    """
    want = want.float()
    usual = want.abs().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((got.float() - want).abs() / torch.maximum(want.abs(), usual)).max())


def replace_norms(model: nn.Module, ops: SmallOps) -> int:
    """Replace the RMS norms of `model`; returns how many."""
    leaves = [(name, m) for name, m in model.named_modules() if name and not list(m.children())]
    num_replaced = 0
    for name, module in leaves:
        formula = None if type(module) is nn.Linear else find_formula(module)
        if formula is not None:
            model.set_submodule(name, RmsNorm(module, formula, ops))
            num_replaced += 1
    return num_replaced


def restore_norms(model: nn.Module) -> None:
    """Put the model's own norms back."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, RmsNorm)]
    for name, norm in found:
        model.set_submodule(name, norm.norm)
