"""Linear layers of a loaded model with weights of 8 or 4 bits instead of its own.

Layers are replaced by what they are, not by name, so any model's are:

    model.quantization    layers that narrow    other layers    the head    embeddings, norms
    int8                  int8                  int8            int8        as loaded
    int4                  int8                  int4            int8        as loaded

A layer that narrows (fewer outputs than inputs: the keys and values of grouped-query attention, the
second half of an MLP) loses most by 4 bits and is seldom the larger part. The head decides between
tokens; one that is tied to the embedding gets codes of its own, since the embedding is looked up,
not multiplied. Experts that a model holds in one parameter of three dimensions are no layers and
stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from deployments.execution.quantized_products import PackedWeight, Products
from deployments.execution.quantized_weight import quantize_weight

logger = logging.getLogger(__name__)

Quantization = Literal["int8", "int4"]


class CannotQuantize(RuntimeError):
    """A model without anything to quantise; the message says what to change."""


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight; inference only.

    Args:
        layer: its weight is quantised; its bias is shared.
        num_bits: 8 or 4.
        products: computes it.
        is_kept: whether the layer itself stays for later, because its weight does anyway.
    """

    def __init__(
        self, layer: nn.Linear, num_bits: int, products: Products, is_kept: bool = False
    ) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._products = products
        # No parameters or buffers: a cast of the model must not touch codes and scales.
        self._weight = products.pack(quantize_weight(layer.weight.detach(), num_bits))
        self._bias = None if layer.bias is None else layer.bias.detach()
        # In a list, since it is no part of this module.
        self._kept = [layer] if is_kept else []

    @property
    def weight_form(self) -> PackedWeight:
        """The quantised weight as it is kept."""
        return self._weight

    @property
    def kept_layer(self) -> nn.Linear | None:
        """The layer this stands for, if it was kept."""
        return self._kept[0] if self._kept else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        num_rows = x.numel() // self.in_features
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(num_rows, self.in_features)
        out = self._products.linear(rows, self._weight, self._bias)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bits = self._weight.num_bits
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={bits}"


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What became of a model's weights."""

    num_layers: int
    """That are quantised now."""
    num_quantized_bytes: int
    """Codes and scales of these."""
    num_other_bytes: int
    """Everything else: embeddings, norms, biases, and what could not be quantised."""
    left: tuple[str, ...]
    """Names of matrices that are multiplied as loaded, the largest first."""

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return self.num_quantized_bytes + self.num_other_bytes


def quantize_linears(
    model: Any, quantization: Quantization, products: Products
) -> QuantizationReport:
    """Replace the linear layers of a transformers model, one after the other, so that memory never
    holds both forms of more than one.

    Raises:
        CannotQuantize: it has none.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    head = model.get_output_embeddings()
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    num_layers = 0
    for name in names:
        layer = model.get_submodule(name)
        if not layer.weight.isfinite().all():
            continue
        num_bits = _num_bits(layer, layer is head, quantization)
        is_shared = uses[id(layer.weight)] > 1
        model.set_submodule(name, QuantizedLinear(layer, num_bits, products, is_shared))
        num_layers += 1
    if num_layers == 0:
        raise CannotQuantize(
            f"model type {model.config.model_type!r} has no linear layers to quantise; set "
            "model.quantization to none"
        )
    return _report(model)


def _num_bits(layer: nn.Linear, is_head: bool, quantization: Quantization) -> int:
    narrows = layer.out_features < layer.in_features
    return 8 if quantization == "int8" or is_head or narrows else 4


def _report(model: nn.Module) -> QuantizationReport:
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    biases = [m._bias for m in layers if m._bias is not None]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = [x for x in model.named_parameters() if x[1].ndim > 1 and id(x[1]) not in embeddings]
    left = [name for name, _ in sorted(others, key=lambda x: -x[1].numel())]
    report = QuantizationReport(
        num_layers=len(layers),
        num_quantized_bytes=sum(layer.weight_form.num_bytes for layer in layers),
        num_other_bytes=sum(p.nbytes for p in [*model.parameters(), *biases]),
        left=tuple(left),
    )
    logger.info(
        "%d linear layers quantised: all weights now take %.0f MB",
        report.num_layers,
        report.num_bytes / 1e6,
    )
    if left:
        logger.warning(
            "%d matrices cannot be quantised and stay as loaded, %s the largest", len(left), left[0]
        )
    return report


def restore_kept_linears(model: nn.Module) -> None:
    """Put the layers back whose weights stayed; the others' are gone."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    for name, quantized in found:
        if quantized.kept_layer is not None:
            model.set_submodule(name, quantized.kept_layer)
