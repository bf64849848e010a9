"""Products with quantised weights: who computes them, and the layout each of them keeps the weights
in.

    TorchProducts      any device: a block of weights becomes floats, then torch multiplies; the
                       twin that the other is tested against
    CompiledProducts   a CPU with a compiler: native/quantized_rows.cpp, which multiplies codes as
                       it reads them
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from deployments.execution.native.compiler import find_kernels
from deployments.execution.native.kernel import Kernel
from deployments.execution.quantized_weight import GROUP, QuantizedWeight

_SOURCE = Path(__file__).parent / "native" / "quantized_rows.cpp"
_PANEL = 32
"""Outputs of a panel of the kernel."""
_NUM_AT_ONCE = 2**22
"""Weights that torch has as floats at once, unless it is a GPU's, whose launches cost more."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised matrix in the layout of one of the products."""

    num_inputs: int
    num_outputs: int
    num_bits: int
    codes: Tensor
    parameters: Tensor
    """bfloat16, scales and for 4 bits centres"""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.codes.nbytes + self.parameters.nbytes


class Products(Protocol):
    """Linear layers with quantised weights."""

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """The weight in the layout that `linear` reads."""
        ...

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """[num_rows, num_inputs] times a weight that `pack` made, plus bias [num_outputs] of x's
        dtype: [num_rows, num_outputs] of x's dtype. At least one row.
        """
        ...


class TorchProducts:
    """By torch's own operations alone, on any device. The layout is the plain one:

        codes        [num_outputs, num_filled_inputs], int8; 4 bits: half as many bytes, of which
                     byte b has input 2b in its lower half
        parameters   [1 or 2, num_outputs, num_groups]

    On a CPU sums are float32; on a GPU products are those of x's dtype (it has not been run on
    one).
    """

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """See Products."""
        codes = weight.codes
        if weight.num_bits == 4:
            codes = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.uint8)
        return PackedWeight(
            weight.num_inputs,
            codes.shape[0],
            weight.num_bits,
            codes.contiguous(),
            _parameters(weight).contiguous(),
        )

    def unpack(self, weight: PackedWeight) -> QuantizedWeight:
        """What `pack` was given."""
        codes = weight.codes
        if weight.num_bits == 4:
            halves = torch.stack((codes & 15, codes >> 4), -1)
            codes = halves.view(torch.int8).flatten(1)
        scales, *centres = weight.parameters
        return QuantizedWeight(weight.num_inputs, codes, scales, centres[0] if centres else None)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """See Products."""
        on_cpu = x.device.type == "cpu"
        dtype = torch.float32 if on_cpu else x.dtype
        num_at_once = _NUM_AT_ONCE if on_cpu else 16 * _NUM_AT_ONCE
        num_rows = max(1, num_at_once // weight.num_inputs)
        rows = x.to(dtype)
        out = x.new_empty(x.shape[0], weight.num_outputs)
        for start in range(0, weight.num_outputs, num_rows):
            end = min(start + num_rows, weight.num_outputs)
            part = PackedWeight(
                weight.num_inputs,
                end - start,
                weight.num_bits,
                weight.codes[start:end],
                weight.parameters[:, start:end],
            )
            floats = self.unpack(part).dequantized().to(dtype)
            offset = None if bias is None else bias[start:end].to(dtype)
            out[:, start:end] = functional.linear(rows, floats, offset)
        return out


def _parameters(weight: QuantizedWeight) -> Tensor:
    """[1 or 2, num_outputs, num_groups]"""
    centres = [] if weight.centres is None else [weight.centres]
    return torch.stack([weight.scales, *centres])


class CompiledProducts:
    """By the compiled kernel, which has the picture of its layout; sums are float32, and a row's
    do not depend on the rows beside it.

    Args:
        library: of native/quantized_rows.cpp.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._kernels = {
            (8, torch.float32): Kernel(loaded, "int8_float32"),
            (8, torch.bfloat16): Kernel(loaded, "int8_bfloat16"),
            (4, torch.float32): Kernel(loaded, "int4_float32"),
            (4, torch.bfloat16): Kernel(loaded, "int4_bfloat16"),
        }

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """See Products."""
        num_outputs = weight.codes.shape[0]
        fill = -num_outputs % _PANEL
        codes = functional.pad(weight.codes, (0, 0, 0, fill))
        depth = 16 // weight.num_bits  # inputs of a line of 64 bytes
        # The two halves of a panel's outputs share a word.
        lines = codes.view(-1, 2, _PANEL // 2, codes.shape[1] // depth, depth)
        lines = lines.permute(0, 3, 2, 4, 1)
        if weight.num_bits == 4:
            lines = lines[..., 0] | lines[..., 1] << 4
        parameters = functional.pad(_parameters(weight), (0, 0, 0, fill))
        parameters = parameters.view(len(parameters), -1, _PANEL, codes.shape[1] // GROUP)
        return PackedWeight(
            weight.num_inputs,
            num_outputs,
            weight.num_bits,
            lines.contiguous(),
            parameters.permute(1, 3, 0, 2).contiguous(),
        )

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """See Products."""
        kernel = self._kernels.get((weight.num_bits, x.dtype))
        if kernel is None:
            wide = self.linear(x.float(), weight, None if bias is None else bias.float())
            return wide.to(x.dtype)
        x = x.contiguous()
        out = x.new_empty(x.shape[0], weight.num_outputs)
        kernel(
            (x, weight.codes, weight.parameters, bias, out),
            (x.shape[0], weight.num_inputs, weight.num_outputs, torch.get_num_threads()),
        )
        return out


def choose_products(device: torch.device, compiles: bool, cache: Path) -> Products:
    """The fastest there is for this device; says so where a CPU has to take torch.

    Args:
        compiles: whether the machine's compiler may be used.
        cache: where the library is kept.
    """
    loss = "quantised weights go through torch, which is much slower"
    may_compile = compiles and device.type == "cpu"
    return find_kernels(CompiledProducts, _SOURCE, may_compile, cache, loss) or TorchProducts()
