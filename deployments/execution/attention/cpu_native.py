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

import numpy as np
import torch
from torch import Tensor

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec
from deployments.execution.native.compiler import compile_once
from deployments.execution.native.kernel import Kernel

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[1] / "native" / "paged_attention.cpp"
DTYPES = (torch.float32, torch.bfloat16)
"""Of queries, keys and values; sums are float32."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step as the kernel reads it, for layers of any window; all on the CPU."""

    num_rows: int
    block_size: int
    shapes: tuple[Tensor, Tensor, Tensor, Tensor]
    """starts, num_queries, num_context, table_starts: [num_rows] each, int64"""
    tables: Tensor
    """[num_blocks of all rows], int32"""

    @classmethod
    def build(cls, batch: InputBatch) -> NativePlan:
        """The rows of a batch as flat arrays; a row's table is cut after its last key."""
        rows, size = batch.rows, batch.block_size
        shapes = np.array(
            [(row.start, row.num_queries, row.num_context) for row in rows], dtype=np.int64
        ).reshape(-1, 3)
        starts, num_queries, num_context = np.ascontiguousarray(shapes.T)
        num_blocks = -(-(num_context + num_queries) // size)
        table_starts = np.cumsum(num_blocks) - num_blocks
        used = (row.block_table[:count] for row, count in zip(rows, num_blocks, strict=True))
        tables = np.fromiter(chain.from_iterable(used), np.int32, int(num_blocks.sum()))
        first, second, third, fourth, flat = map(
            torch.from_numpy, (starts, num_queries, num_context, table_starts, tables)
        )
        return cls(len(rows), size, (first, second, third, fourth), flat)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it that differs between steps of as many rows."""
        return (*self.shapes, self.tables)


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
        names = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
        self._attend = Kernel(ctypes.CDLL(str(library)), names[dtype])

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

    def tensors_of(self, plan: NativePlan) -> tuple[Tensor, ...]:
        """See TapePlans."""
        return plan.tensors

    def attend(self, call: AttentionCall, cache: LayerCache, plan: NativePlan) -> Tensor:
        """See AttentionBackend.

        Raises:
            MemoryError: the kernel's scratch memory does not fit.
        """
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = cache.values.shape[2:]
        out = query.new_empty(num_tokens, num_heads, value_dim)
        # The kernel adds them to float32 sums.
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        self._attend(
            (*plan.tensors, sinks, query, cache.keys, cache.values, out),
            (
                plan.num_rows,
                plan.block_size,
                num_heads,
                num_kv_heads,
                key_dim,
                value_dim,
                call.window or 0,
                query.stride(0),
                query.stride(1),
                torch.get_num_threads(),
            ),
            (call.scaling, call.softcap or 0.0),
        )
        return out
