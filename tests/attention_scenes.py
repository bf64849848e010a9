"""Random paged inputs of one attention layer, and the dense formula they are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deployments.execution.attention.backend import AttentionBackend, AttentionCall
from deployments.execution.input_batch import BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache, LayerSpec

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Layer:
    """What a layer asks for."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    block_size: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> LayerSpec:
        """What a backend is asked to support."""
        heads = (self.num_heads, self.num_kv_heads)
        dims = (self.key_dim, self.value_dim)
        return LayerSpec(*heads, *dims, self.window, self.softcap, self.has_sinks)


LAYERS = {
    "plain": Layer(),
    "no groups": Layer(num_kv_heads=4),
    "one kv head": Layer(num_kv_heads=1),
    "wide keys": Layer(key_dim=12, value_dim=5),
    "wide values": Layer(num_heads=6, num_kv_heads=3, key_dim=4, value_dim=16),
    "window": Layer(window=5),
    "window of one": Layer(window=1),
    "window of a block": Layer(window=4),
    "window beyond all": Layer(window=1000),
    "softcap": Layer(softcap=0.7),
    "sinks": Layer(has_sinks=True),
    "all at once": Layer(
        num_heads=6, num_kv_heads=2, value_dim=5, window=6, softcap=0.7, has_sinks=True
    ),
    "blocks of one": Layer(block_size=1, window=3),
    "large blocks": Layer(block_size=64),
    "bfloat16": Layer(dtype=torch.bfloat16),
    "bfloat16, all at once": Layer(
        num_kv_heads=1, window=6, softcap=0.7, has_sinks=True, dtype=torch.bfloat16
    ),
}

# (tokens in the cache, queries); rows of one query come first, as in every batch.
MIXES = {
    "one decode": [(9, 1)],
    "first token": [(0, 1)],
    "like decodes": [(8, 1), (9, 1), (11, 1)],
    "unlike decodes": [(70, 1), (0, 1), (3, 1), (33, 1), (4, 1)],
    "first chunk": [(0, 13)],
    "later chunk": [(16, 9)],
    "chunk of two, at a block's end": [(7, 2), (8, 8)],
    "decodes and chunks": [(40, 1), (2, 1), (19, 1), (0, 7), (5, 3), (12, 12)],
}


@dataclass
class Scene:
    """A step's input to one layer; keys and values of each row in order, for the dense formula."""

    call: AttentionCall
    cache: LayerCache
    batch: InputBatch
    keys: list[Tensor]
    values: list[Tensor]


def make_scene(layer: Layer, mix: list[tuple[int, int]], seed: int = 0) -> Scene:
    """Random tokens in shuffled blocks. Whatever no row may read is NaN, but for the null block."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (2.0 * torch.randn(*shape, generator=generator)).to(layer.dtype)

    size = layer.block_size
    counts = [-(-(context + queries) // size) for context, queries in mix]
    num_blocks = sum(counts) + 4
    ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    dims = (layer.key_dim, layer.value_dim)
    stores = [
        torch.full((num_blocks, size, layer.num_kv_heads, d), float("nan"), dtype=layer.dtype)
        for d in dims
    ]
    for store in stores:
        store[0] = 0.0
    cache = LayerCache(*stores)
    rows, own, start = [], [], 0
    for (context, queries), count in zip(mix, counts, strict=True):
        # One block more than needed, as after a decode that is about to outgrow its own.
        table = [ids.pop() for _ in range(count)] + ([ids[0]] if count % 2 else [])
        rows.append(BatchRow(start, queries, context, table))
        length = context + queries
        pair = tuple(normal(length, layer.num_kv_heads, d) for d in dims)
        slots = torch.tensor([table[p // size] * size + p % size for p in range(length)])
        cache.write(*pair, slots)
        own.append(pair)
        start += queries
    call = AttentionCall(
        query=normal(start, layer.num_heads, layer.key_dim),
        key=torch.cat([keys[row.num_context :] for row, (keys, _) in zip(rows, own, strict=True)]),
        value=torch.cat(
            [vals[row.num_context :] for row, (_, vals) in zip(rows, own, strict=True)]
        ),
        scaling=layer.key_dim**-0.5 * 1.3,
        window=layer.window,
        softcap=layer.softcap,
        sinks=normal(layer.num_heads) if layer.has_sinks else None,
    )
    return Scene(call, cache, batch_of(rows, size), *map(list, zip(*own, strict=True)))


def batch_of(rows: list[BatchRow], block_size: int) -> InputBatch:
    empty = torch.empty(0, dtype=torch.int64)
    num_decodes = sum(row.num_queries == 1 for row in rows)
    return InputBatch(empty, empty, empty, empty, tuple(rows), num_decodes, (), (), block_size)


def attend(backend: AttentionBackend[Any], scene: Scene) -> Tensor:
    windows = frozenset({scene.call.window, None, 3})
    return backend.attend(scene.call, scene.cache, backend.plan(scene.batch, windows))


def dense_formula(scene: Scene) -> Tensor:
    """All queries of a row at once, over its keys in order: no pages, no cache, in float64."""
    call, out = scene.call, []
    for row, keys, values in zip(scene.batch.rows, scene.keys, scene.values, strict=True):
        query = call.query[row.start : row.start + row.num_queries].double()
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        distance = torch.arange(row.num_context, row.num_keys)[:, None] - torch.arange(row.num_keys)
        sees = (distance >= 0) & (distance < (call.window or row.num_keys + 1))
        weights = scores.exp() * sees
        total = weights.sum(dim=-1, keepdim=True)
        if call.sinks is not None:
            total = total + call.sinks.double().exp()[:, None, None]
        out.append(torch.einsum("hqk,khd->qhd", weights / total, values))
    return torch.cat(out)
