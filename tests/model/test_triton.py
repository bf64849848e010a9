"""What the contract of all backends does not see of the Triton one: splits, tiles, head sizes of
real models, and that every kernel variant compiles for real GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_scenes import MIXES, TOLERANCE, Layer, attend, make_scene

from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.attention.triton_tiles import (
    MAX_NUM_SPLITS,
    MIN_SPLIT_KEYS,
    choose_num_splits,
    chunk_tiles,
    decode_tiles,
)
from deployments.execution.input_batch import BatchRow, InputBatch
from deployments.execution.static_plans import StaticShape

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="triton compiles for the GPU here: see tests/gpu"
)
CPU = torch.device("cpu")


def make_backend(layer: Layer, num_processors: int = 1) -> Any:
    from deployments.execution.attention.triton_backend import TritonAttention

    return TritonAttention([layer.spec], layer.dtype, CPU, num_processors)


SPLIT_LAYERS = {
    "plain": Layer(block_size=16),
    "sinks": Layer(has_sinks=True, block_size=16),
    "window": Layer(window=1500, softcap=0.7, has_sinks=True, value_dim=5, block_size=16),
    "bfloat16": Layer(dtype=torch.bfloat16, block_size=16),
}


@needs_triton
@interpreted
@pytest.mark.parametrize("layer", SPLIT_LAYERS.values(), ids=SPLIT_LAYERS.keys())
def test_decodes_over_splits_are_the_reference(layer: Layer) -> None:
    """A long decode shared by several programs, beside one too short to fill a split and a chunk:
    the merge weighs each split right, a sink counts once, an empty split not at all.
    """
    scene = make_scene(layer, [(2100, 1), (3, 1), (700, 1), (5, 3)], seed=4)
    backend = make_backend(layer, num_processors=64)
    assert choose_num_splits(3 * layer.num_kv_heads, min(2101, layer.window or 2101), 64) > 1
    got, want = attend(backend, scene), attend(ReferenceAttention(), scene)
    torch.testing.assert_close(got, want, atol=TOLERANCE[layer.dtype], rtol=1e-2)


HEADS = {
    "SmolLM2": Layer(num_heads=9, num_kv_heads=3, key_dim=64, value_dim=64, block_size=16),
    "head of 80": Layer(key_dim=80, value_dim=80, block_size=16),
    "head of 96, group of 8": Layer(8, 1, 96, 96, block_size=16),
    "DeepSeek": Layer(4, 4, 192, 128, block_size=16),
    "Gemma": Layer(4, 1, 256, 256, window=20, softcap=50.0, block_size=16),
    "group of 71": Layer(71, 1, 16, 16, block_size=16),
    "float16": Layer(dtype=torch.float16, key_dim=64, value_dim=64, block_size=16),
}


@needs_triton
@interpreted
@pytest.mark.parametrize("layer", HEADS.values(), ids=HEADS.keys())
def test_heads_of_real_models_are_the_reference(layer: Layer) -> None:
    """Groups and heads that are no power of two fill tiles only in part."""
    scene = make_scene(layer, MIXES["decodes and chunks"], seed=5)
    got = attend(make_backend(layer), scene)
    torch.testing.assert_close(
        got, attend(ReferenceAttention(), scene), atol=TOLERANCE[layer.dtype], rtol=1e-2
    )


@needs_triton
@interpreted
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64])
@pytest.mark.parametrize("num_keys", [1, 1023, 1024, 4096])
def test_the_kinds_of_plans_are_told_ahead(num_rows: int, num_keys: int) -> None:
    """A kind that graphs are not recorded for runs plainly for good; one that no plan is of is
    recorded for nothing; and plans of one kind launch what was recorded.
    """
    backend = make_backend(Layer(num_heads=16, num_kv_heads=8, block_size=16), 132)
    shape = StaticShape(num_rows, 0, num_blocks=256, block_size=16)
    kinds = backend.plan_kinds(shape)
    assert kinds == ((0, 1) if num_rows <= 16 else (0,))
    row = BatchRow(0, 1, num_keys - 1, [0] * 256)
    nothing = torch.empty(0, dtype=torch.int64)
    batch = InputBatch(
        *[nothing] * 4, (row,) * num_rows, num_rows, (), (), block_size=shape.block_size
    )
    plan = backend.plan(batch, {None})
    kind = backend.plan_kind(plan)
    assert kind in kinds
    static = backend.make_static(replace(shape, kind=kind))
    assert backend.plan_kind(static) == kind
    backend.fill_static(static, plan)
    assert torch.equal(static.decode_tiles, plan.decode_tiles)


@needs_triton
def test_what_is_too_wide_for_a_tile_is_refused() -> None:
    """A head that registers cannot hold is refused at load, not at the first step."""
    layer = Layer(key_dim=576, value_dim=512)
    assert not make_backend(layer).supports(layer.spec)


def test_a_decode_is_split_only_where_that_helps() -> None:
    """Many decodes fill a device by themselves, short ones are not worth a merge, and no count
    passes the bound.
    """
    assert choose_num_splits(8, 100_000, 132) == MAX_NUM_SPLITS
    assert choose_num_splits(2 * 132, 100_000, 132) == 1
    assert choose_num_splits(64, 100_000, 132) == 4
    assert choose_num_splits(8, MIN_SPLIT_KEYS, 132) == 1
    assert choose_num_splits(8, 3 * MIN_SPLIT_KEYS, 132) == 3


@pytest.mark.parametrize("group", [1, 3, 4, 7, 71, 128, 200])
@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_tile_holds_at_least_one_query(group: int, dim: int, element_bytes: int) -> None:
    """Tiles are powers of two, as wide as a matrix unit takes, and hold a whole group."""
    for make in (decode_tiles, chunk_tiles):
        tiles = make(group, dim, element_bytes)
        assert tiles.num_queries(group) >= 1
        for size in (tiles.num_rows, tiles.num_keys):
            assert size >= 16
            assert size & (size - 1) == 0


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_every_variant_compiles_for_real_gpus(capability: int, tmp_path: Path) -> None:
    """What the interpreter takes and a GPU's compiler does not; products must reach the matrix
    units of the GPU (float32 has none that are exact), and no register may spill.
    """
    script = Path(__file__).parent / "compile_kernels.py"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 12
    for variant in found:
        assert variant["num_spilled_bytes"] == 0, variant
        if "attend" in variant["name"] and "fp32" not in variant["name"]:
            assert variant["instructions"], variant
