"""What the compiled attention has of its own: tiles, pieces of long rows, threads, and its choice.

That it is the reference on small steps is in test_attention_backends.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_attention_backends import (
    LAYERS,
    Layer,
    attend,
    batch_of,
    dense_formula,
    make_scene,
    native_attention,
)

from deployments.config import ExecutionConfig
from deployments.execution.attention.choice import choose_backend
from deployments.execution.load_gate import UnsupportedModel

BFLOAT16 = torch.bfloat16
SHAPES = {
    "heads of 64": Layer(num_heads=9, num_kv_heads=3, key_dim=64, value_dim=64, block_size=16),
    "heads of 40": Layer(key_dim=40, value_dim=40),
    "heads of 80": Layer(num_heads=8, num_kv_heads=1, key_dim=80, value_dim=80, dtype=BFLOAT16),
    "heads of 96": Layer(num_heads=5, num_kv_heads=1, key_dim=96, value_dim=96),
    "no groups, wide keys": Layer(num_kv_heads=4, key_dim=48, value_dim=32, dtype=BFLOAT16),
    "window of a tile": Layer(window=64, block_size=16),
    "window in a tile": Layer(window=63, block_size=7, has_sinks=True),
    "window beyond a piece": Layer(window=300, softcap=0.7),
    "odd": replace(LAYERS["all at once"], key_dim=13, value_dim=21, window=70, block_size=3),
}
# Around the ends of tiles (64 keys), of pieces (256), and of strips of queries.
LONG_MIX = [(62, 1), (63, 1), (64, 1), (255, 1), (256, 1), (700, 1), (520, 2), (250, 9), (61, 70)]
LONG_MIX += [(0, 65), (0, 200)]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("layer", SHAPES.values(), ids=SHAPES.keys())
def test_long_rows_are_the_dense_formula(layer: Layer, num_threads: int) -> None:
    """Rows around the ends of tiles and pieces attend to just what they see, on any number of
    threads; blocks of others hold NaN.
    """
    scene = make_scene(layer, LONG_MIX)
    torch.set_num_threads(num_threads)
    got = attend(native_attention(layer.dtype), scene)
    atol = 1e-5 if layer.dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), dense_formula(scene), atol=atol, rtol=1e-2)


@pytest.mark.parametrize("layer", SHAPES.values(), ids=SHAPES.keys())
def test_a_row_is_the_same_to_the_bit_in_any_step(layer: Layer) -> None:
    """Neighbours, the place in the batch and the number of threads change no bit of a row."""
    scene = make_scene(layer, LONG_MIX, seed=1)
    backend = native_attention(layer.dtype)
    torch.set_num_threads(3)
    together = attend(backend, scene)
    torch.set_num_threads(1)
    for row in scene.batch.rows:
        tokens = slice(row.start, row.start + row.num_queries)
        call = replace(scene.call, query=scene.call.query[tokens])
        batch = batch_of([replace(row, start=0)], layer.block_size)
        alone = attend(backend, replace(scene, call=call, batch=batch))
        assert torch.equal(alone, together[tokens]), row


def test_queries_are_read_by_their_strides() -> None:
    """Queries as the model makes them, heads before tokens, are not copied and not mixed up."""
    layer = SHAPES["heads of 64"]
    scene = make_scene(layer, [(5, 1), (9, 20)])
    heads_first = scene.call.query.transpose(0, 1).contiguous().transpose(0, 1)
    strided = replace(scene, call=replace(scene.call, query=heads_first))
    backend = native_attention(layer.dtype)
    assert torch.equal(attend(backend, strided), attend(backend, scene))


def test_a_key_that_is_no_number_spoils_only_who_sees_it() -> None:
    """NaN in a row's key reaches that row's later queries, and no other row."""
    layer = SHAPES["heads of 64"]
    scene = make_scene(layer, [(70, 1), (10, 30), (20, 1)])
    spoiled = scene.batch.rows[1]
    scene.cache.keys[spoiled.block_table[0], 5] = float("nan")
    out = attend(native_attention(layer.dtype), scene)
    tokens = slice(spoiled.start, spoiled.start + spoiled.num_queries)
    assert out[tokens].isnan().all()
    assert out[: spoiled.start].isfinite().all()
    assert out[tokens.stop :].isfinite().all()


# --- the choice -----------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_auto_takes_torch_where_the_kernel_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler attention goes through torch, and the log says so; a dtype the kernel
    lacks, or compiling switched off, is no reason to warn.
    """
    quiet = [(ExecutionConfig(), torch.float16), (ExecutionConfig(compile_kernels=False), BFLOAT16)]
    for execution, dtype in quiet:
        assert choose_backend(execution, (), dtype, CPU, tmp_path).name == "cpu_sdpa"
    assert caplog.text == ""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        chosen = choose_backend(ExecutionConfig(), (), BFLOAT16, CPU, tmp_path)
    assert chosen.name == "cpu_sdpa"
    assert "install g++ or set CXX" in caplog.text


def test_naming_the_kernel_where_it_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """execution.attention_backend: cpu_native never means another backend."""
    named = ExecutionConfig(attention_backend="cpu_native")
    off = ExecutionConfig(attention_backend="cpu_native", compile_kernels=False)
    with pytest.raises(UnsupportedModel, match="float16"):
        choose_backend(named, (), torch.float16, CPU, tmp_path)
    with pytest.raises(UnsupportedModel, match="compile_kernels is off"):
        choose_backend(off, (), BFLOAT16, CPU, tmp_path)
