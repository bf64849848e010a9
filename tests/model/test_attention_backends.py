"""Every backend against the reference on random paged inputs, and the reference against a dense
formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deployments.config import ModelConfig
from deployments.execution.attention.backend import AttentionBackend, AttentionCall
from deployments.execution.attention.cpu_native import CpuNativeAttention
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.input_batch import BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache
from deployments.execution.model_source import cache_root
from deployments.execution.native.compiler import CannotCompile

BACKENDS = {
    "reference": lambda dtype: ReferenceAttention(),
    "cpu_sdpa": lambda dtype: CpuSdpaAttention(dtype, torch.device("cpu")),
    "cpu_native": lambda dtype: native_attention(dtype),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


@cache
def native_attention(dtype: torch.dtype) -> CpuNativeAttention:
    """The compiled backend, built in the kernels' usual place; skips where it cannot be."""
    try:
        return CpuNativeAttention.compiled(cache_root(ModelConfig()), dtype)
    except CannotCompile as error:
        pytest.skip(str(error))


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


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_the_reference_is_the_dense_formula(layer: Layer, mix: list[tuple[int, int]]) -> None:
    """What the reference reads through pages, one key at a time, is the textbook formula."""
    scene = make_scene(layer, mix)
    got = attend(ReferenceAttention(), scene)
    torch.testing.assert_close(
        got.double(), dense_formula(scene), atol=TOLERANCE[layer.dtype], rtol=1e-2
    )


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "reference"])
def test_a_backend_is_the_reference(name: str, layer: Layer, mix: list[tuple[int, int]]) -> None:
    """A backend agrees with the reference, and nothing leaks in from blocks of others or past a
    row's end.
    """
    scene = make_scene(layer, mix, seed=1)
    got = attend(BACKENDS[name](layer.dtype), scene)
    want = attend(ReferenceAttention(), scene)
    assert got.shape == want.shape
    assert got.dtype == layer.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, atol=TOLERANCE[layer.dtype], rtol=1e-2)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Each row alone gets what it gets in the batch, wherever it stands in it."""
    for layer in (Layer(), Layer(window=5), LAYERS["all at once"]):
        scene = make_scene(layer, MIXES["decodes and chunks"], seed=2)
        backend = BACKENDS[name](layer.dtype)
        together = attend(backend, scene)
        for row in scene.batch.rows:
            tokens = slice(row.start, row.start + row.num_queries)
            call = replace(
                scene.call,
                query=scene.call.query[tokens],
                key=scene.call.key[tokens],
                value=scene.call.value[tokens],
            )
            batch = batch_of([replace(row, start=0)], layer.block_size)
            alone = attend(backend, replace(scene, call=call, batch=batch))
            torch.testing.assert_close(alone, together[tokens], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_shared_prefix_is_read_by_all_who_share_it(name: str) -> None:
    """Rows whose tables begin with the same blocks each see them, as after a prefix hit."""
    layer = Layer()
    scene = make_scene(layer, [(11, 1), (9, 6)], seed=3)
    first, second = scene.batch.rows
    table = [*first.block_table[:2], *second.block_table[2:]]
    rows = [first, replace(second, block_table=table)]
    shared = replace(
        scene,
        batch=batch_of(rows, layer.block_size),
        keys=[scene.keys[0], torch.cat([scene.keys[0][:8], scene.keys[1][8:]])],
        values=[scene.values[0], torch.cat([scene.values[0][:8], scene.values[1][8:]])],
    )
    got = attend(BACKENDS[name](layer.dtype), shared)
    torch.testing.assert_close(got.double(), dense_formula(shared), atol=2e-6, rtol=1e-4)
    assert not torch.allclose(got[1:], attend(BACKENDS[name](layer.dtype), scene)[1:], atol=1e-2)
