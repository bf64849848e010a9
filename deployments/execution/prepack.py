"""Linear weights in the layout a CPU's products want, laid out once at load instead of at each
product.

    weights     CPU                                   compiler    a few rows       many rows
    float32     any                                   yes         compiled kernel  compiled kernel
    bfloat16    does not multiply them                yes         compiled kernel  compiled kernel
    bfloat16    multiplies vectors (AVX512_BF16)      yes         compiled kernel  compiled kernel
    bfloat16    multiplies matrices (AMX, Arm)        yes         compiled kernel  oneDNN, reordered
    float32     any                                   no          torch, one row   oneDNN, reordered
    bfloat16    does not multiply them                no          torch, one row   oneDNN, widened
    bfloat16    multiplies them                       no          oneDNN           oneDNN, reordered

Few rows are bound by reading the weights, many by multiplying. The compiled kernel needs no second
copy of the weights; where oneDNN is faster for many rows, both forms are kept.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from deployments.execution.compiled_linear import CompiledLinear, LinearKernel

logger = logging.getLogger(__name__)

MAX_FEW_ROWS = 8
"""Up to so many rows go to the compiled kernel where oneDNN multiplies bfloat16 by matrices."""
_DTYPES = (torch.float32, torch.bfloat16)


def multiplies_bfloat16() -> bool:
    """Whether this CPU's matrix kernels take bfloat16; without them it is several times slower than
    float32.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return _has_onednn() and supported is not None and bool(supported())


def _multiplies_matrices(kernel: LinearKernel) -> bool:
    """Whether oneDNN has instructions for bfloat16 that the kernel does not use."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return multiplies_bfloat16() and (has_tiles() or not kernel.multiplies_bfloat16)


def _has_onednn() -> bool:
    """Whether it is there, and torch still has the private operations by which it is asked."""
    wanted = ("_reorder_linear_weight", "_linear_pointwise")
    has_operations = all(hasattr(torch.ops.mkldnn, name) for name in wanted)
    return has_operations and bool(torch.backends.mkldnn.is_available())


class PrepackedLinear(nn.Module):
    """A linear layer with a copy of its weight that oneDNN reordered; inference only.

    Args:
        layer: its weight is copied into the new layout.
        packed_dtype: of the copy.
        few_rows: the same layer by the compiled kernel, for up to MAX_FEW_ROWS rows; None: `layer`
            is kept, and serves single rows where the copy is wider than it.
    """

    def __init__(
        self, layer: nn.Linear, packed_dtype: torch.dtype, few_rows: CompiledLinear | None
    ) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._dtype = layer.weight.dtype
        self._packed_dtype = packed_dtype
        # In lists, since they are no part of this module: nobody is to find them among the modules
        # of the model, and replace them.
        self._few_rows = [] if few_rows is None else [few_rows]
        self._kept = [layer] if few_rows is None else []
        self._packed_bias = None if layer.bias is None else layer.bias.detach().to(packed_dtype)
        weight = layer.weight.detach().to(packed_dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def layer(self) -> nn.Linear:
        """The layer this stands for."""
        return self._kept[0] if self._kept else self._few_rows[0].layer()

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], for models that ask a layer for its weight."""
        return self.layer().weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        num_rows = x.numel() // self.in_features
        if self._few_rows and num_rows <= MAX_FEW_ROWS:
            few: Tensor = self._few_rows[0](x)
            return few
        if num_rows == 1 and self._packed_dtype is torch.float32:
            return self._one_row(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._packed_dtype), self._packed, self._packed_bias, "none", [], ""
        )
        return out.to(self._dtype)

    def _one_row(self, x: Tensor) -> Tensor:
        """By a matrix-vector product, without what a matrix product costs around it."""
        layer = self._kept[0]
        out = torch.mv(layer.weight, x.reshape(self.in_features))
        out = out if layer.bias is None else out + layer.bias
        return out.view(*x.shape[:-1], self.out_features)


def prepack_linears(model: nn.Module, num_free_bytes: int, kernel: LinearKernel | None) -> int:
    """Replace the linear layers of `model`; returns how many.

    None is replaced if copies would take more than half of `num_free_bytes`, which the KV cache
    needs too.

    Args:
        kernel: None: this machine has no compiled kernel.
    """
    found = {name: layer for name, layer in model.named_modules() if _is_packable(layer)}
    if not found or (kernel is None and not _has_onednn()):
        return 0
    shared = _shared_weights(model, found)
    num_bytes = _num_extra_bytes(found, shared, kernel)
    if num_bytes > num_free_bytes // 2:
        logger.warning("weights are not prepacked: their copies would take %d bytes", num_bytes)
        return 0
    names = list(found)
    # A layer that is replaced is let go before the next one is packed.
    found.clear()
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        few_rows: CompiledLinear | None = None
        if kernel is not None:
            few_rows = CompiledLinear(layer, kernel, keeps_layer=id(layer.weight) in shared)
        reordered = _reordered_dtype(layer.weight.dtype, kernel)
        if reordered is not None:
            model.set_submodule(name, PrepackedLinear(layer, reordered, few_rows))
        elif few_rows is not None:
            model.set_submodule(name, few_rows)
    return len(names)


def _reordered_dtype(dtype: torch.dtype, kernel: LinearKernel | None) -> torch.dtype | None:
    """Of oneDNN's copy of a weight of `dtype`; None: the compiled kernel serves all rows. Each
    layer's own, since a model may hold a router in float32 on purpose.
    """
    if kernel is None:
        return dtype if dtype is torch.bfloat16 and multiplies_bfloat16() else torch.float32
    return dtype if dtype is torch.bfloat16 and _multiplies_matrices(kernel) else None


def _is_packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype in _DTYPES


def _shared_weights(model: nn.Module, layers: dict[str, nn.Linear]) -> set[int]:
    """The ids of parameters that others than `layers` hold: a head's that is tied to the
    embedding.
    """
    ours = {id(layer) for layer in layers.values()}
    others = [module for module in model.modules() if id(module) not in ours]
    return {id(own) for module in others for own in module.parameters(recurse=False)}


def _num_extra_bytes(
    layers: dict[str, nn.Linear], shared: set[int], kernel: LinearKernel | None
) -> int:
    """What packed and reordered weights take beyond the memory of those that are let go."""
    num_bytes = 0
    weights = [layer.weight for layer in layers.values()]
    for weight in weights:
        reordered = _reordered_dtype(weight.dtype, kernel)
        if reordered is not None:
            num_bytes += weight.numel() * reordered.itemsize
        if kernel is not None and id(weight) in shared:
            num_bytes += weight.nbytes
    # One is packed before it is let go.
    return num_bytes + (max(weight.nbytes for weight in weights) if kernel is not None else 0)


def restore_linears(model: nn.Module) -> None:
    """Put plain layers back in the place of all that were replaced."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (CompiledLinear, PrepackedLinear))
    ]
    for name, packed in found:
        model.set_submodule(name, packed.layer())
