"""Linear weights in the layout a CPU's matrix kernels want, reordered once at load instead of at
each product.

    weights     CPU                     a few rows   many rows
    float32     any                     as loaded    float32, reordered
    bfloat16    multiplies bfloat16     reordered    reordered
    bfloat16    does not                as loaded    widened to float32, reordered

Few rows are bound by reading the weights (see few_rows), many by multiplying; a CPU without
bfloat16 products multiplies float32 several times faster, at the price of a second, wider copy of
the weights.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from deployments.execution.few_rows import FewRows

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
        layer: its weight is copied into the new layout.
        packed_dtype: of the copy.
        few_rows: computes few rows by the weight as loaded, so the layer is kept; None: the copy
            serves them, too, and the layer is let go.
    """

    def __init__(
        self, layer: nn.Linear, packed_dtype: torch.dtype, few_rows: FewRows | None
    ) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._dtype = layer.weight.dtype
        self._packed_dtype = packed_dtype
        self._few_rows = few_rows
        # In a list, since it is no part of this module: nobody is to find it among the modules of
        # the model, and replace it.
        self._kept = [] if few_rows is None else [layer]
        self._packed_bias = None if layer.bias is None else layer.bias.detach().to(packed_dtype)
        weight = layer.weight.detach().to(packed_dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    @property
    def kept_layer(self) -> nn.Linear | None:
        """The layer this stands for, if it was kept."""
        return self._kept[0] if self._kept else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self._few_rows is not None:
            num_rows = x.numel() // self.in_features
            if 0 < num_rows <= self._few_rows.max_rows:
                rows = x.reshape(num_rows, self.in_features)
                layer = self._kept[0]
                few = self._few_rows.linear(rows, layer.weight, layer.bias)
                return few.view(*x.shape[:-1], self.out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._packed_dtype), self._packed, self._packed_bias, "none", [], ""
        )
        return out.to(self._dtype)


def _packed_form(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """Of the copy for weights of `dtype`: its dtype, and whether the loaded weight stays."""
    if dtype is torch.bfloat16 and multiplies_bfloat16():
        return torch.bfloat16, False
    return torch.float32, True


def prepack_linears(model: nn.Module, num_free_bytes: int, few_rows: FewRows) -> int:
    """Replace the linear layers of `model`; returns how many. `few_rows` serves them where the
    weights stay as loaded.

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
        model.set_submodule(name, PrepackedLinear(layer, dtype, few_rows if keeps_weight else None))
    return len(found)


def restore_linears(model: nn.Module) -> None:
    """Put the layers back that were kept."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, PrepackedLinear)]
    for name, packed in found:
        if packed.kept_layer is not None:
            model.set_submodule(name, packed.kept_layer)
