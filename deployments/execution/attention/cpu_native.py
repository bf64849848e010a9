"""Attention by a compiled kernel that reads the paged cache where it lies: no gather, no masks.

Owns how a step and a layer are told to `native/paged_attention.cpp`, and the choice of whether to
use it at all. The kernel decides how the work is cut.

    rows                  A (decode)   B (decode)   C (chunk)
    num_context            9            4            5
    num_queries            1            1            3
    tables (flat)         [7 2 4       | 5 9        | 1 8 ...]     a table needs only the blocks
    table_starts           0             3            5            that hold its keys
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec
from deployments.execution.native.compiler import compile_once

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[1] / "native" / "paged_attention.cpp"
DTYPES = (torch.float32, torch.bfloat16)
"""Of queries, keys and values; sums are float32."""


class _Step(ctypes.Structure):
    """`Step` of native/paged_layout.h."""

    _fields_ = [
        ("num_rows", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "num_queries", "num_context")),
        ("table_starts", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    ]


class _Layer(ctypes.Structure):
    """`Layer` of native/paged_layout.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_dim")),
        *((name, ctypes.c_int64) for name in ("value_dim", "window")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out")),
    ]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step as the kernel reads it, for layers of any window."""

    step: _Step
    arrays: tuple[npt.NDArray[Any], ...]
    """What `step` points to, kept alive with it."""

    @classmethod
    def build(cls, batch: InputBatch) -> NativePlan:
        """The rows of a batch as flat arrays; a row's table is cut after its last key."""
        rows, size = batch.rows, batch.block_size
        shapes = np.array(
            [(row.start, row.num_queries, row.num_context) for row in rows], dtype=np.int64
        ).reshape(-1, 3)
        starts, num_queries, num_context = np.ascontiguousarray(shapes.T)
        num_blocks = -(-(num_context + num_queries) // size)
        ends = np.cumsum(num_blocks)
        table_starts = ends - num_blocks
        used = (row.block_table[:count] for row, count in zip(rows, num_blocks, strict=True))
        tables = np.fromiter(chain.from_iterable(used), np.int32, int(num_blocks.sum()))
        arrays = (starts, num_queries, num_context, table_starts, tables)
        step = _Step(len(rows), size, *(array.ctypes.data for array in arrays))
        return cls(step, arrays)


class CpuNativeAttention:
    """The backend of a CPU with a compiler.

    Args:
        library: of native/paged_attention.cpp.
        dtype: of queries, keys and values, one of DTYPES.

    Raises:
        OSError: the library cannot be loaded.
    """

    name = "cpu_native"

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        loaded = ctypes.CDLL(str(library))
        names = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
        self._attend = loaded[names[dtype]]
        self._attend.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._attend.restype = ctypes.c_int

    @classmethod
    def compiled(cls, cache: Path, dtype: torch.dtype) -> CpuNativeAttention:
        """Compile the kernel, once, into `cache`, and load it.

        Raises:
            CannotCompile, OSError: there is no compiler, or it or the loading fails.
        """
        return cls(compile_once(_SOURCE, cache), dtype)

    def supports(self, spec: LayerSpec) -> bool:
        return spec.num_heads % spec.num_kv_heads == 0

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> NativePlan:
        return NativePlan.build(batch)

    def attend(self, call: AttentionCall, cache: LayerCache, plan: NativePlan) -> Tensor:
        """See AttentionBackend.

        Raises:
            MemoryError: the kernel's scratch memory does not fit.
        """
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = cache.values.shape[2:]
        out = query.new_empty(num_tokens, num_heads, value_dim)
        # The kernel adds them to float32 sums; a name keeps the copy alive through the call.
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        layer = _Layer(
            num_heads,
            num_kv_heads,
            key_dim,
            value_dim,
            call.window or 0,
            call.scaling,
            call.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            out.data_ptr(),
        )
        if self._attend(ctypes.byref(plan.step), ctypes.byref(layer), torch.get_num_threads()) != 0:
            raise MemoryError("attention found no memory for its sums; lower cache.max_gb")
        return out
