"""Gated feed-forward blocks (Shazeer, 2020) of a model, as two products with one operation between.

    down_proj(silu(gate_proj(x)) * up_proj(x))  =  down(gate(gate_up(x)))

A module is such a block if it has these four parts and answers a random input as this line does.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from deployments.execution.fused_linear import fuse, split
from deployments.execution.small_ops import SmallOps

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_SCALES = (1.0, 30.0, 1000.0)
"""Of the inputs tried: some blocks clamp large values, which small ones do not show."""


class GatedMlp(nn.Module):
    """down(silu(gate) * up); inference only. Its two linear layers are plain, to be packed or
    quantised as any other.

    Args:
        block: the model's own, kept without its linear layers, which are taken over.
    """

    def __init__(self, block: nn.Module, ops: SmallOps) -> None:
        super().__init__()
        gate, up, down = (block.get_submodule(name) for name in _LINEARS)
        assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)
        self._sizes = [gate.out_features, up.out_features]
        self._has_bias = [gate.bias is not None, up.bias is not None]
        self.gate_up = fuse([gate, up])
        self.down = down
        for name in _LINEARS:
            block.set_submodule(name, nn.Identity())
        # In a list, since it is no part of this module: nobody is to find it in the model.
        self._block = [block]
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        out: Tensor = self.down(self._ops.silu_gate(self.gate_up(x)))
        return out

    def block(self) -> nn.Module:
        """The module this stands for, with its linear layers; they must be plain ones again."""
        assert type(self.gate_up) is nn.Linear
        gate, up = split(self.gate_up, self._sizes, self._has_bias)
        block = self._block[0]
        for name, layer in zip(_LINEARS, (gate, up, self.down), strict=True):
            block.set_submodule(name, layer)
        return block


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether it computes what a GatedMlp does, by plain linear layers of a dtype that SmallOps
    has.
    """
    children = dict(module.named_children())
    layers = [children.pop(name, None) for name in _LINEARS]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    if len(plain) < len(layers) or len(children) > 1 or list(module.parameters(recurse=False)):
        return False
    gate, up, down = plain
    if not {layer.weight.dtype for layer in plain} <= set(SmallOps.dtypes):
        return False
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(len(_SCALES), 4, gate.weight.shape[1], generator=generator)
    x = (random * torch.tensor(_SCALES)[:, None, None]).flatten(0, 1)[None].to(gate.weight.dtype)
    try:
        with torch.inference_mode():
            answer = module(x)
            return isinstance(answer, Tensor) and torch.equal(answer, down(silu(gate(x)) * up(x)))
    except Exception:  # it takes other inputs, whatever it says of these
        return False


def replace_gated_mlps(model: nn.Module, ops: SmallOps) -> int:
    """Replace the gated blocks of `model`; returns how many."""
    times = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    names = [
        name
        for name, module in model.named_modules()
        # One that two layers share would stay, emptied, in the second.
        if hasattr(module, _LINEARS[0]) and times[id(module)] == 1 and is_gated_mlp(module)
    ]
    for name in names:
        model.set_submodule(name, GatedMlp(model.get_submodule(name), ops))
    return len(names)


def restore_gated_mlps(model: nn.Module) -> None:
    """Put the model's own blocks back."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, GatedMlp)]
    for name, mlp in found:
        model.set_submodule(name, mlp.block())
