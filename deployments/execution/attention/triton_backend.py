"""Attention by Triton kernels, for GPUs: ragged queries, pages of any size, every feature of a
layer.

Owns the step's tables and the launches; `triton_kernels` computes, `triton_tiles` cuts. Nothing
here waits for the device. Triton compiles for a CUDA device, or interprets on the CPU where
TRITON_INTERPRET=1 was set before it was imported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.attention.triton_kernels import attend_kernel, merge_kernel
from deployments.execution.attention.triton_tiles import (
    Tiles,
    choose_num_splits,
    chunk_tiles,
    decode_tiles,
    next_power_of_two,
    num_lanes,
)
from deployments.execution.input_batch import NULL_TABLE, BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec
from deployments.execution.static_plans import StaticShape
from deployments.execution.upload import upload

MAX_HEAD_DIM = 256
_TABLE_COLUMNS = 16
"""Block tables are a multiple of this wide, so that few widths are seen."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The tables of a step, on the device.

    a tile   [ row, first token, its position, number of queries ]
    """

    block_tables: Tensor
    """[num_rows, num_columns], int32, 0 where a row has no block"""
    decode_tiles: Tensor
    """[num_decodes, 4], int32, one query each"""
    chunk_tiles: dict[int, Tensor]
    """[num_tiles, 4], int32, by the most queries a tile holds: layers may differ in it"""
    max_decode_keys: int
    """Of the longest decode; 0: there is none."""


class TritonAttention:
    """The backend for GPUs.

    Args:
        specs: of the layers to come; the tiles of their queries are listed once a step.
        dtype: of the model's queries.
        device: of the model.
        num_processors: multiprocessors of the device; by default as many as it has.
    """

    name = "triton"

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        device: torch.device,
        num_processors: int | None = None,
    ) -> None:
        self._device = device
        self._element_bytes = dtype.itemsize
        self._num_processors = num_processors or _num_processors(device)
        self._queries_per_tile = sorted({self._queries_of(spec) for spec in specs})
        self._fewest_kv_heads = min(spec.num_kv_heads for spec in specs)

    def _queries_of(self, spec: LayerSpec) -> int:
        group = spec.num_heads // spec.num_kv_heads
        tiles = chunk_tiles(group, max(spec.key_dim, spec.value_dim), self._element_bytes)
        return tiles.num_queries(group)

    def supports(self, spec: LayerSpec) -> bool:
        return max(spec.key_dim, spec.value_dim) <= MAX_HEAD_DIM

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> TritonPlan:
        decodes, chunks = batch.rows[: batch.num_decodes], batch.rows[batch.num_decodes :]
        tables, decode_tiles, *chunk_tiles = upload(
            [
                _block_tables(batch.rows, batch.block_size),
                _list_tiles(decodes, 0, 1),
                *(_list_tiles(chunks, len(decodes), most) for most in self._queries_per_tile),
            ],
            self._device,
        )
        return TritonPlan(
            block_tables=tables,
            decode_tiles=decode_tiles,
            chunk_tiles=dict(zip(self._queries_per_tile, chunk_tiles, strict=True)),
            max_decode_keys=max((row.num_keys for row in decodes), default=0),
        )

    def plan_kind(self, plan: TritonPlan) -> int:
        """See StaticPlans: whether decodes are split, as a few long ones are."""
        return int(self._splits(len(plan.decode_tiles), plan.max_decode_keys))

    def plan_kinds(self, shape: StaticShape) -> Sequence[int]:
        """See StaticPlans."""
        longest = shape.num_blocks * shape.block_size
        return (0, 1) if self._splits(shape.num_rows, longest) else (0,)

    def _splits(self, num_decodes: int, num_keys: int) -> bool:
        """Whether some layer splits so many decodes, the longest of which has so many keys."""
        num_programs = num_decodes * self._fewest_kv_heads
        return choose_num_splits(num_programs, num_keys, self._num_processors) > 1

    def make_static(self, shape: StaticShape) -> TritonPlan:
        """See StaticPlans."""
        columns = _num_columns(shape.num_blocks)
        tables = torch.zeros(shape.num_rows, columns, dtype=torch.int32, device=self._device)
        nobody = [BatchRow(row, 1, 0, NULL_TABLE) for row in range(shape.num_rows)]
        [tiles] = upload([_list_tiles(nobody, 0, 1)], self._device)
        return TritonPlan(
            block_tables=tables,
            decode_tiles=tiles,
            chunk_tiles={most: tiles[:0] for most in self._queries_per_tile},
            max_decode_keys=shape.num_blocks * shape.block_size if shape.kind else 1,
        )

    def fill_static(self, static: TritonPlan, plan: TritonPlan) -> None:
        """See StaticPlans."""
        # Columns beyond the longest row keep what they held; no row reads them.
        static.block_tables[:, : plan.block_tables.shape[1]].copy_(plan.block_tables)
        static.decode_tiles.copy_(plan.decode_tiles)

    def attend(self, call: AttentionCall, cache: LayerCache, plan: TritonPlan) -> Tensor:
        num_tokens, num_heads, _ = call.query.shape
        out = call.query.new_empty(num_tokens, num_heads, call.value.shape[-1])
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        group = num_heads // call.key.shape[1]
        widest = max(call.query.shape[-1], out.shape[-1])
        launch = _Launch(call, query, cache, plan)
        if plan.max_decode_keys:
            tiles = decode_tiles(group, widest, self._element_bytes)
            self._attend_decodes(launch, tiles, out)
        tiles = chunk_tiles(group, widest, self._element_bytes)
        listed = plan.chunk_tiles[tiles.num_queries(group)]
        if len(listed):
            launch.attend(listed, tiles, out, None)
        return out

    def _attend_decodes(self, launch: _Launch, tiles: Tiles, out: Tensor) -> None:
        call, plan = launch.call, launch.plan
        num_decodes = len(plan.decode_tiles)
        visible = min(plan.max_decode_keys, call.window or plan.max_decode_keys)
        num_splits = choose_num_splits(
            num_decodes * call.key.shape[1], visible, self._num_processors
        )
        if num_splits == 1:
            launch.attend(plan.decode_tiles, tiles, out, None)
            return
        # The first rows are the decodes, and their tokens the first tokens.
        partial = torch.empty(
            (num_decodes, out.shape[1], num_splits, out.shape[2]),
            dtype=torch.float32,
            device=out.device,
        )
        lse = partial.new_empty(partial.shape[:3])
        launch.attend(plan.decode_tiles, tiles, partial, lse)
        merge_kernel[(num_decodes, out.shape[1])](
            out,
            partial,
            lse,
            num_splits,
            VALUE_DIM=out.shape[2],
            VALUE_LANES=num_lanes(out.shape[2]),
            SPLIT_LANES=next_power_of_two(num_splits),
        )


@dataclass(frozen=True, slots=True)
class _Launch:
    """One layer of a step, ready to run over any list of tiles."""

    call: AttentionCall
    query: Tensor
    cache: LayerCache
    plan: TritonPlan

    def attend(self, listed: Tensor, tiles: Tiles, out: Tensor, lse: Tensor | None) -> None:
        """Run the tiles [num_tiles, 4]. With `lse` [num_tokens, num_heads, num_splits], `out` is
        [num_tokens, num_heads, num_splits, value_dim], fp32.
        """
        call, plan, query = self.call, self.plan, self.query
        num_kv_heads, key_dim = call.key.shape[1:]
        value_dim = call.value.shape[-1]
        num_splits = 1 if lse is None else lse.shape[2]
        attend_kernel[(len(listed), num_kv_heads, num_splits)](
            out,
            out if lse is None else lse,
            query,
            self.cache.keys,
            self.cache.values,
            query if call.sinks is None else call.sinks,
            listed,
            plan.block_tables,
            float(call.scaling),
            float(call.softcap or 0.0),
            query.stride(0),
            query.stride(1),
            plan.block_tables.stride(0),
            num_splits,
            GROUP=query.shape[1] // num_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_LANES=num_lanes(key_dim),
            VALUE_LANES=num_lanes(value_dim),
            BLOCK_SIZE=self.cache.keys.shape[1],
            WINDOW=call.window or 0,
            HAS_SOFTCAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            IS_SPLIT=lse is not None,
            TILE_ROWS=tiles.num_rows,
            TILE_KEYS=tiles.num_keys,
            WIDENS=query.device.type == "cpu",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _num_columns(num_blocks: int) -> int:
    """Of a table for rows of at most so many blocks."""
    return -(-num_blocks // _TABLE_COLUMNS) * _TABLE_COLUMNS


def _block_tables(rows: Sequence[BatchRow], block_size: int) -> NDArray[np.int32]:
    """[num_rows, num_columns], int32"""
    counts = [-(-row.num_keys // block_size) for row in rows]
    tables = np.zeros((len(rows), _num_columns(max(counts, default=1))), dtype=np.int32)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tables[index, :count] = row.block_table[:count]
    return tables


def _list_tiles(rows: Sequence[BatchRow], first_row: int, most: int) -> NDArray[np.int32]:
    """[num_tiles, 4], int32: these rows' queries, at most so many in a tile."""
    pieces = [
        (first_row + index, row.start + begin, row.num_context + begin, size)
        for index, row in enumerate(rows)
        for begin in range(0, row.num_queries, most)
        for size in (min(most, row.num_queries - begin),)
    ]
    return np.array(pieces, dtype=np.int32).reshape(-1, 4)
