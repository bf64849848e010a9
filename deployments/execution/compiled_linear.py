"""Linear layers by the compiled kernel of `native/linear.cpp`, over weights packed once at load.

Owns the packed layout and the call; which layers are packed, and what else could compute them, is
prepack's business. For any number of rows: one row reads the weights at the speed of memory, many
are multiplied at the speed of the machine's vectors, and weights stay as narrow as they are stored.

    weight [num_outputs, num_inputs]      panel p: outputs [16 p, 16 p + 16), zeros beyond the last
    float32   packed [num_panels, num_inputs, 16]
    bfloat16  packed [num_panels, num_inputs / 2, 16, 2]      an odd input more is a zero
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn

from deployments.execution.native.compiler import find_kernels
from deployments.execution.native.kernel import Kernel

PANEL = 16
"""Outputs of a panel, as native/linear.cpp has it."""
_SOURCE = Path(__file__).parent / "native" / "linear.cpp"


class LinearKernel:
    """The compiled kernel; sums are float32, and a row's result does not depend on the rows
    beside it.

    Args:
        library: of native/linear.cpp.

    Raises:
        OSError: it cannot be loaded.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._kernels = {
            torch.float32: Kernel(loaded, "linear_float32"),
            torch.bfloat16: Kernel(loaded, "linear_bfloat16"),
        }
        self.multiplies_bfloat16 = bool(loaded.linear_multiplies_bfloat16())
        """Whether bfloat16 is multiplied as it is, rather than widened to float32 first."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """[..., num_inputs] times the packed weight, plus bias [num_outputs]: [..., num_outputs],
        all of one of `dtypes`.

        Raises:
            MemoryError: there is none left for the rows.
        """
        x = x.contiguous()
        *shape, num_inputs = x.shape
        out = x.new_empty(*shape, num_outputs)
        num_rows = x.numel() // num_inputs
        if num_rows > 0:
            self._kernels[x.dtype](
                (x, packed, bias, out),
                (num_rows, num_inputs, num_outputs, torch.get_num_threads()),
            )
        return out


def pack(weight: Tensor) -> Tensor:
    """A weight [num_outputs, num_inputs] of one of the kernel's dtypes, in its layout."""
    num_outputs, num_inputs = weight.shape
    pair = 2 if weight.dtype is torch.bfloat16 else 1
    num_panels, num_steps = -(-num_outputs // PANEL), -(-num_inputs // pair)
    if num_outputs % PANEL or num_inputs % pair:
        whole = weight.new_zeros(num_panels * PANEL, num_steps * pair)
        whole[:num_outputs, :num_inputs] = weight
    else:
        whole = weight
    return whole.view(num_panels, PANEL, num_steps, pair).transpose(1, 2).contiguous()


def unpack(packed: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """The weight [num_outputs, num_inputs] that was packed, bit by bit."""
    return packed.transpose(1, 2).flatten(2).flatten(0, 1)[:num_outputs, :num_inputs].contiguous()


class CompiledLinear(nn.Module):
    """A linear layer whose weight lies packed; inference only.

    Args:
        layer: its weight is packed.
        kernel: computes it.
        keeps_layer: whether the layer is kept beside the packed weight, as one should whose weight
            somebody else holds anyway; else `layer` makes an equal one.
    """

    def __init__(self, layer: nn.Linear, kernel: LinearKernel, keeps_layer: bool) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._kernel = kernel
        self._packed = pack(layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach()
        # In a list, since it is no part of this module: nobody is to find it among the modules of
        # the model, and replace it.
        self._kept = [layer] if keeps_layer else []

    def layer(self) -> nn.Linear:
        """The layer this stands for."""
        if self._kept:
            return self._kept[0]
        layer = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self._bias is not None,
            device="meta",
            dtype=self._packed.dtype,
        )
        weight = unpack(self._packed, self.out_features, self.in_features)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if self._bias is not None:
            layer.bias = nn.Parameter(self._bias, requires_grad=False)
        return layer

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], for models that ask a layer for its weight; made anew."""
        return self.layer().weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return self._kernel.linear(x, self._packed, self._bias, self.out_features)


def find_linear_kernel(compiles: bool, cache: Path) -> LinearKernel | None:
    """The compiled kernel; None, and a line in the log, where this machine cannot have it.

    Args:
        compiles: whether the machine's compiler may be used.
        cache: where the library is kept.
    """
    loss = "linear layers go through torch, which is slower"
    return find_kernels(LinearKernel, _SOURCE, compiles, cache, loss)
