"""Linear weights in the layout a CPU's matrix kernels want, reordered once at load instead of at
each product.

    weights     CPU                     one row      several rows
    float32     any                     as loaded    float32, reordered
    bfloat16    multiplies bfloat16     reordered    reordered
    bfloat16    does not                as loaded    widened to float32, reordered

One row is bound by reading the weights, several by multiplying; a CPU without bfloat16 products
multiplies float32 several times faster, at the price of a second, wider copy of the weights.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def multiplies_bfloat16() -> bool:
    """Whether this CPU's matrix kernels take bfloat16; without them it is several times slower than
    float32.
    """
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())


class PrepackedLinear(nn.Module):
    """A linear layer with a reordered copy of its weight; inference only.

    Args:
        layer: its bias is shared, its weight copied into the new layout.
        packed_dtype: of the copy.
        keeps_weight: whether one row goes through the weight as loaded.
    """

    def __init__(self, layer: nn.Linear, packed_dtype: torch.dtype, keeps_weight: bool) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._dtype = layer.weight.dtype
        self._packed_dtype = packed_dtype
        self.bias = layer.bias
        self.weight = layer.weight if keeps_weight else None
        self._packed_bias = None if layer.bias is None else layer.bias.detach().to(packed_dtype)
        weight = layer.weight.detach().to(packed_dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self.weight is not None and x.numel() == self.in_features:
            return self._one_row(x, self.weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._packed_dtype), self._packed, self._packed_bias, "none", [], ""
        )
        return out.to(self._dtype)

    def _one_row(self, x: Tensor, weight: Tensor) -> Tensor:
        # A matrix-vector product, without what a matrix product of one row costs around it.
        out = torch.mv(weight, x.view(-1))
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)


def _packed_form(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """Of the copy for weights of `dtype`: its dtype, and whether the loaded weight stays."""
    if dtype is torch.bfloat16 and multiplies_bfloat16():
        return torch.bfloat16, False
    return torch.float32, True


def prepack_linears(model: nn.Module, num_free_bytes: int) -> int:
    """Replace the linear layers of `model`; returns how many.

    None is replaced if their copies would take more than half of `num_free_bytes`, which the KV
    cache needs too.
    """
    found = [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear]
    if not found or found[0][1].weight.dtype not in (torch.float32, torch.bfloat16):
        return 0
    if not _has_onednn():
        return 0
    dtype, keeps_weight = _packed_form(found[0][1].weight.dtype)
    num_bytes = sum(layer.weight.numel() for _, layer in found) * dtype.itemsize
    if num_bytes > num_free_bytes // 2:
        logger.warning("weights are not prepacked: their copies would take %d bytes", num_bytes)
        return 0
    for name, layer in found:
        model.set_submodule(name, PrepackedLinear(layer, dtype, keeps_weight))
    return len(found)
