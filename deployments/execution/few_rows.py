"""Linear layers of a few rows, which are bound by reading the weights: who computes them.

A decode step of one stream is one row, of eight streams eight. Matrix kernels are made for more and
read the weights at half the speed of memory or less; `native/few_rows.cpp` reads them once and in
order.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deployments.execution.native.compiler import CannotCompile, compile_once

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "native" / "few_rows.cpp"


class FewRows(Protocol):
    """Linear layers of up to `max_rows` rows."""

    @property
    def max_rows(self) -> int: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[num_rows, num_inputs] times weight [num_outputs, num_inputs], plus bias [num_outputs]:
        [num_rows, num_outputs], all of one dtype, float32 or bfloat16. At least one row.
        """
        ...


class TorchRow:
    """One row by torch: a matrix-vector product, without what a matrix product costs around it."""

    max_rows = 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See FewRows."""
        out = torch.mv(weight, x[0])
        return (out if bias is None else out + bias)[None]


class CompiledRows:
    """Up to eight rows by the compiled kernel; sums are float32. More go faster reordered.

    Args:
        library: of native/few_rows.cpp.

    Raises:
        OSError: it cannot be loaded.
    """

    max_rows = 8

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._functions = {
            torch.float32: _declared(loaded.linear_float32),
            torch.bfloat16: _declared(loaded.linear_bfloat16),
        }

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See FewRows."""
        x = x.contiguous()
        num_rows, num_inputs = x.shape
        num_outputs = weight.shape[0]
        out = x.new_empty(num_rows, num_outputs)
        self._functions[x.dtype](
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            torch.get_num_threads(),
        )
        return out


def _declared(function: Callable[..., None]) -> Callable[..., None]:
    function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


def choose_few_rows(compiles: bool, cache: Path) -> FewRows:
    """The fastest there is on this machine; says so where that is torch.

    Args:
        compiles: whether the machine's compiler may be used.
        cache: where the library is kept.
    """
    if not compiles:
        return TorchRow()
    try:
        return CompiledRows(compile_once(_SOURCE, cache))
    except (CannotCompile, OSError) as error:
        logger.warning("one row at a time goes through torch, which is slower: %s", error)
        return TorchRow()
