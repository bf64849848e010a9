"""Weights of 8 or 4 bits: how one is made of a matrix and what it stands for.

    inputs     0 .. 31   32 .. 63   ...            a group: 32 inputs of one output
    codes     | c c c c | c c c c |                int8: -127 .. 127    int4: 0 .. 15
    scales    |    s    |    s    |                bfloat16
    centres   |    z    |    z    |                bfloat16, int4 alone

    int8   weight = code * scale                    8.5 bits a weight
    int4   weight = (code - 8) * scale + centre     5 bits a weight

Round to nearest (as GGUF's Q8_0 and Q4_1), without calibration: quantising takes seconds and needs
no data. Does not know layers or how products are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
"""Inputs that share a scale."""
_NUM_AT_ONCE = 2**22
"""Weights in work at once: what is made on the way stays small beside the model."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [num_outputs, num_inputs]; inputs are filled with zeros to whole groups."""

    num_inputs: int
    codes: Tensor
    """[num_outputs, num_groups * GROUP], int8"""
    scales: Tensor
    """[num_outputs, num_groups], bfloat16"""
    centres: Tensor | None
    """[num_outputs, num_groups], bfloat16; None: int8"""

    @property
    def num_bits(self) -> int:
        """Of a code."""
        return 8 if self.centres is None else 4

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """The outputs from `start` to before `end`, as views."""
        centres = None if self.centres is None else self.centres[start:end]
        return QuantizedWeight(
            self.num_inputs, self.codes[start:end], self.scales[start:end], centres
        )

    def dequantized(self) -> Tensor:
        """[num_outputs, num_inputs], float32: what the codes stand for."""
        num_outputs, num_groups = self.scales.shape
        codes = self.codes.view(num_outputs, num_groups, GROUP).float()
        scales = self.scales.float()[..., None]
        if self.centres is None:
            weights = codes * scales
        else:
            # As the kernel does it: one product and one sum a weight.
            least = self.centres.float()[..., None] - 8.0 * scales
            weights = torch.addcmul(least, codes, scales)
        return weights.view(num_outputs, -1)[:, : self.num_inputs]


def quantize_weight(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """Quantise a finite matrix [num_outputs, num_inputs] of any floating dtype to 8 or 4 bits."""
    num_inputs = weight.shape[1]
    num_rows = max(1, _NUM_AT_ONCE // num_inputs)
    quantize = _quantize_int8 if num_bits == 8 else _quantize_int4
    parts = [quantize(_grouped(rows)) for rows in weight.split(num_rows)]
    codes, scales, centres = zip(*parts, strict=True)
    return QuantizedWeight(
        num_inputs,
        torch.cat(codes).flatten(1),
        torch.cat(scales)[..., 0],
        None if centres[0] is None else torch.cat(centres)[..., 0],
    )


def _grouped(rows: Tensor) -> Tensor:
    """[num_outputs, num_groups, GROUP], float32"""
    filled = functional.pad(rows.float(), (0, -rows.shape[1] % GROUP))
    return filled.view(rows.shape[0], -1, GROUP)


def _rounded_scale(scale: Tensor) -> Tensor:
    # A group of equal weights has none; any will do.
    return torch.where(scale > 0, scale, 1.0).to(torch.bfloat16)


# Codes are chosen after scales and centres are rounded, so that those add no error of their own.


def _quantize_int8(groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    scales = _rounded_scale(groups.abs().amax(-1, keepdim=True) / 127)
    codes = (groups / scales.float()).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales, None


def _quantize_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = _rounded_scale((most - least) / 15)
    # A group of equal weights is all centre.
    centres = torch.where(most > least, least + 8 * scales.float(), least).to(torch.bfloat16)
    codes = ((groups - centres.float()) / scales.float()).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.int8), scales, centres
