"""Every backend against the reference on random paged inputs, and the reference against a dense
formula.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from attention_scenes import (
    LAYERS,
    MIXES,
    TOLERANCE,
    Layer,
    attend,
    batch_of,
    dense_formula,
    make_scene,
)

from deployments.config import ModelConfig
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.cpu_native import CpuNativeAttention
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.model_source import cache_root
from deployments.execution.native.compiler import CannotCompile

CPU = torch.device("cpu")


def make_triton(layer: Layer) -> AttentionBackend[Any]:
    """Triton's kernels, interpreted."""
    from deployments.execution.attention.triton_backend import TritonAttention

    return TritonAttention([layer.spec], layer.dtype, CPU)


@cache
def native_attention(dtype: torch.dtype) -> CpuNativeAttention:
    """The compiled backend, built in the kernels' usual place; skips where it cannot be."""
    try:
        return CpuNativeAttention.compiled(cache_root(ModelConfig()), dtype)
    except CannotCompile as error:
        pytest.skip(str(error))


BACKENDS = {
    "reference": lambda layer: ReferenceAttention(),
    "cpu_sdpa": lambda layer: CpuSdpaAttention(layer.dtype, CPU),
    "cpu_native": lambda layer: native_attention(layer.dtype),
    "triton": make_triton,
}


@pytest.fixture(autouse=True)
def interpreted_if_triton(request: pytest.FixtureRequest) -> None:
    """Skip what needs Triton where it is missing, or compiles for a GPU instead."""
    if "triton" not in request.node.name:
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("triton compiles for the GPU here: see tests/gpu")


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
    got = attend(BACKENDS[name](layer), scene)
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
        backend = BACKENDS[name](layer)
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
    got = attend(BACKENDS[name](layer), shared)
    torch.testing.assert_close(got.double(), dense_formula(shared), atol=2e-6, rtol=1e-4)
    assert not torch.allclose(got[1:], attend(BACKENDS[name](layer), scene)[1:], atol=1e-2)
