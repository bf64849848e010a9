"""The benchmark of GPUs (`loadtest.bench_gpu`), on a CPU and a tiny model: what it measures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def test_the_figures_follow_from_the_times() -> None:
    """MBU and MFU of other weights than were read and multiplied, or a mixed step over the faster
    of its parts.
    """
    times = {"decode 1": 0.01, "decode 8": 0.012, "decode 32": 0.02, "prefill": 0.1, "mixed": 0.115}
    scene = bench_gpu.Scene(AutoConfig.for_model("llama"), torch.device("cpu"), 1024, 2048, 1.0)
    found = bench_gpu.figures_of(times, 0.006, 7_000_000_000, scene, 800.0)
    assert [found[f"decode {n}"]["mbu"] for n in (1, 8, 32)] == [0.6, 0.5, 0.3]
    assert found["prefill"] == {"step_ms": 100.0, "tflops": 286.72, "mfu": 0.358}
    assert found["mixed"]["over_slower"] == 1.15


def test_it_measures_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "gpu.json"
    assert bench_gpu.main(arguments(tmp_path, save_result=kept)) == 0
    result = json.loads(kept.read_text())
    assert json.loads(capsys.readouterr().out) == result
    inner = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
    assert result["num_weights"] == inner + 131 * 64
    steps = ["decode 1", "decode 8", "decode 32", "prefill", "mixed"]
    assert list(result["graphs off"]) == steps
    assert all(result["graphs off"][name]["step_ms"] > 0 for name in steps)
    assert "graphs auto" not in result, "there are none on a CPU"


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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(bench_gpu.read_hf_config(None))
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248
