"""Linear layers that read the same input become one: query, key and value; gate and up.

Which ones they are is seen, not known: siblings that one forward of the model gave the very same
tensor, once each. The first of them computes all, the others hand out their parts:

    q_proj = FusedLinear    x -> [ q | k | v ] -> q      its child `linear` is a plain nn.Linear, to
    k_proj = FusedPart      x ------------------> k      be packed or quantised as any other
    v_proj = FusedPart      x ------------------> v

A part that is asked for another input than the first one saw computes for itself, so an order of
calls that the probe did not see is slower, not wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class _Held:
    """What the parts of one input still wait for; None between forwards."""

    x: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class FusedLinear(nn.Module):
    """Several linear layers of one input as one product; its own output is that of the first.

    Args:
        layers: plain, of one dtype, with the same number of inputs.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.in_features = layers[0].in_features
        self.sizes = [layer.out_features for layer in layers]
        self.has_bias = [layer.bias is not None for layer in layers]
        self.linear = fuse(layers)
        self._held = _Held()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., sizes[0]], a view"""
        held = self._held
        held.x, held.parts = x, self.linear(x).split(self.sizes, -1)
        return held.parts[0]

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output of layer `index` for `x`: [..., sizes[index]], a view."""
        held = self._held
        if held.x is not x:
            self(x)
        part = held.parts[index]
        if index == len(self.sizes) - 1:
            held.x, held.parts = None, ()
        return part

    def layers(self) -> list[nn.Linear]:
        """The layers it was made of; `linear` must be a plain one again."""
        assert type(self.linear) is nn.Linear
        return split(self.linear, self.sizes, self.has_bias)


class FusedPart(nn.Module):
    """Hands out the output of one layer of a FusedLinear."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        # In a list, since it is no part of this module.
        self._fused = [fused]
        self.index = index
        self.out_features = fused.sizes[index]

    @property
    def fused(self) -> FusedLinear:
        """The layer that computes it."""
        return self._fused[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], a view"""
        return self._fused[0].part(x, self.index)


def fuse(layers: list[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of `layers`, one after the other."""
    has_bias = any(layer.bias is not None for layer in layers)
    num_outputs = sum(layer.out_features for layer in layers)
    fused = nn.Linear(layers[0].in_features, num_outputs, bias=has_bias, device="meta")
    weight = torch.cat([layer.weight.detach() for layer in layers])
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        biases = [
            weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def split(fused: nn.Linear, sizes: list[int], has_bias: list[bool]) -> list[nn.Linear]:
    """The layers that `fuse` made one."""
    layers = []
    biases = [None] * len(sizes) if fused.bias is None else fused.bias.detach().split(sizes)
    weights = fused.weight.detach().split(sizes)
    for weight, bias, biased in zip(weights, biases, has_bias, strict=True):
        layer = nn.Linear(fused.in_features, weight.shape[0], bias=biased, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if biased:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        layers.append(layer)
    return layers


# --- in a model -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """Which linear layers a forward called, in order, and with what."""

    calls: list[tuple[str, Tensor]] = field(default_factory=list)

    def groups(self) -> list[list[str]]:
        """Names of siblings that had the same input, called once each."""
        counts = Counter(name for name, _ in self.calls)
        found: dict[tuple[str, int], list[str]] = {}
        for name, x in self.calls:
            if counts[name] == 1:
                found.setdefault((name.rpartition(".")[0], id(x)), []).append(name)
        return [group for group in found.values() if len(group) > 1]


def _watch(model: nn.Module, probe: Callable[[], object]) -> _Seen:
    seen = _Seen()

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        # The tensor is kept, so that no later one gets its id.
        return lambda module, inputs: seen.calls.append((name, inputs[0]))

    hooks = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        probe()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def fuse_linears(model: nn.Module, probe: Callable[[], object]) -> int:
    """Fuse all layers of `model` that read the same input; returns how many groups there were.

    Args:
        probe: runs one forward of `model`.
    """
    groups = _watch(model, probe).groups()
    for names in groups:
        layers = [model.get_submodule(name) for name in names]
        fused = FusedLinear(layers)  # type: ignore[arg-type]
        for index, name in enumerate(names):
            model.set_submodule(name, FusedPart(fused, index) if index else fused)
    return len(groups)


def restore_fused(model: nn.Module) -> None:
    """Put separate layers back in the place of all that were fused."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, FusedLinear)}
    parts = {name: m for name, m in model.named_modules() if isinstance(m, FusedPart)}
    layers = {id(fused): fused.layers() for fused in found.values()}
    for name, fused in found.items():
        model.set_submodule(name, layers[id(fused)][0])
    for name, part in parts.items():
        model.set_submodule(name, layers[id(part.fused)][part.index])
