"""The benchmark of GPUs (`loadtest.bench_gpu`), on a CPU and a tiny model: what it measures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from loadtest import bench_gpu
from loadtest.bench_steps import make_step, num_blocks_of
from loadtest.target_arguments import ArgumentsError

TINY = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_gpu.add_arguments(parser)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    given = vars(parser.parse_args([]))
    given |= {"model_config": path, "device": "cpu", "context": 40, "num_tokens": 64}
    return argparse.Namespace(**given | {"seconds": 0.01} | changes)


def test_each_step_is_what_its_name_says() -> None:
    step = make_step(16, num_decodes=2, context=16, num_prefill_tokens=33, num_computed_tokens=16)
    shares = [(row.num_computed_tokens, row.num_scheduled_tokens) for row in step.scheduled]
    assert shares == [(16, 1), (16, 1), (16, 33)]
    tables = [list(row.block_table) for row in step.scheduled]
    assert tables == [[1, 2], [3, 4], [5, 6, 7, 8]], "no two share a block"
    assert num_blocks_of(step) == 8


def test_the_figures_follow_from_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MBU and MFU of the model's weights, over what the device was measured to do."""
    kept = tmp_path / "gpu.json"
    assert bench_gpu.main(arguments(tmp_path, save_result=kept)) == 0
    result = json.loads(kept.read_text())
    assert json.loads(capsys.readouterr().out) == result
    found = result["graphs off"]
    assert "graphs auto" not in result, "there are none on a CPU"
    inner = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
    read_s = 2 * (inner + 131 * 64) / (result["read_gb_per_s"] * 1e9)
    for count in bench_gpu.NUM_DECODES:
        one = found[f"decode {count}"]
        assert one["mbu"] == pytest.approx(read_s / one["step_ms"] * 1e3, rel=0.05, abs=1e-3)
    mixed = found["mixed"]
    slower_ms = max(found["prefill"]["step_ms"], found["decode 32"]["step_ms"])
    assert mixed["over_slower"] == pytest.approx(mixed["step_ms"] / slower_ms, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="no GPU is visible"):
        bench_gpu.main(arguments(tmp_path, device="cuda"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ArgumentsError, match="bad.json is no config"):
        bench_gpu.main(arguments(tmp_path, model_config=path))


def test_steps_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="takes 256 tokens, not 301"):
        bench_gpu.main(arguments(tmp_path, context=300))


def test_the_shape_it_takes_by_itself_is_that_of_8b() -> None:
    config = bench_gpu.read_hf_config(None)
    assert isinstance(config, type(AutoConfig.for_model("llama")))
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 32)
