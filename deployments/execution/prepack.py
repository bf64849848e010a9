"""Linear weights in the layout a CPU's matrix kernels want, reordered once at load instead of at each product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MIN_FLOAT32_ELEMENTS = 1 << 22
"""In float32 only large weights gain: the plain product has little left to reorder for small ones."""


class PrepackedLinear(nn.Module):
    """A linear layer whose weight is kept reordered by oneDNN; inference only.

    Args:
        linear: its weight is copied into the new layout, its bias is shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def _gains(linear: nn.Linear) -> bool:
    if linear.weight.dtype is torch.bfloat16:
        return multiplies_bfloat16()
    return linear.weight.dtype is torch.float32 and linear.weight.numel() >= MIN_FLOAT32_ELEMENTS


def multiplies_bfloat16() -> bool:
    """Whether this CPU's matrix kernels take bfloat16; without them it is several times slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepack_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` that gain by it; returns how many."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and _gains(module)
    ]
    for name, linear in found:
        model.set_submodule(name, PrepackedLinear(linear))
    return len(found)
