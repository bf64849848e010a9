"""Step times by the cost model, its files, and the executor that spends them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from doubles import make_limits, make_request

import deployments
from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.execution.cost_model import (
    COST_MODELS_DIR,
    ChunkCost,
    CostModel,
    CostModelError,
    DecodeCost,
    StepShape,
    cost_model_names,
)
from deployments.execution.sim_executor import SimExecutor

MODEL = CostModel(
    name="made-up",
    model="any",
    gpu="any",
    source="this test",
    num_kv_tokens=1000,
    decode=DecodeCost(fixed_ms=10.0, per_decode_ms=1.0, per_context_token_ms=0.5),
    chunk=ChunkCost(
        fixed_ms=20.0,
        weights_ms=30.0,
        per_token_ms=2.0,
        per_context_token_ms=0.25,
        per_decode_ms=3.0,
        per_attention_pair_ms=0.125,
        per_prefill_context_token_ms=0.0625,
    ),
    fit_error={},
)


def step_ms(num_decodes: int, context: int, *prefills: tuple[int, int]) -> float:
    return MODEL.step_s(StepShape(num_decodes, context, prefills)) * 1e3


def test_a_decode_step_costs_its_requests_and_the_context_they_read() -> None:
    """A term of the decode formula is missing or has another's coefficient."""
    assert step_ms(4, 100) == pytest.approx(10 + 4 * 1 + 100 * 0.5)


def test_a_chunk_step_costs_the_larger_of_weights_and_tokens() -> None:
    """A term of the chunk formula is missing, or small chunks pay for tokens below the knee."""
    rest = 20 + 3 * 2 + 0.25 * 50
    # Chunks of 4 after 6 and of 2 after 0: pairs 4 * 6 + 10 and 3, attended 10 and 2.
    attention = 0.125 * (34 + 3) + 0.0625 * 12
    assert step_ms(2, 50, (4, 6), (2, 0)) == pytest.approx(rest + attention + 30)
    assert step_ms(0, 0, (100, 0)) == pytest.approx(20 + 200 + 0.125 * 5050 + 0.0625 * 100)


def test_unlike_contexts_cost_a_share_of_the_way_to_the_longest() -> None:
    """A batch whose longest context holds up the others is taken for one of like contexts: the
    RTX PRO 6000 came out 6 % too fast for each token and 15 % for those that queue.
    """
    model = replace(MODEL, context_skew=0.25)
    shape = StepShape(2, 50, skew_tokens=40)
    assert model.step_s(shape) * 1e3 == pytest.approx(10 + 2 * 1 + (50 + 10) * 0.5)
    mixed, alike = replace(shape, prefills=((4, 6),)), StepShape(2, 60, ((4, 6),))
    assert model.step_s(mixed) == pytest.approx(MODEL.step_s(alike))
    later = StepShape(2, 54, skew_tokens=40)
    assert model.decode_steps_s(shape, 3)[2] == model.step_s(later)


def test_an_engines_step_tells_how_unlike_its_decodes_are() -> None:
    """The simulated engine and the decodes that are booked together cost different times."""
    limits, clock = make_limits(), VirtualClock()
    model = replace(MODEL, context_skew=0.25)
    config = SchedulerConfig(chunk_size=32, overlap_ratio=0.0, max_num_seqs=8)
    engine = Engine.build(config, CacheConfig(), SimExecutor(model, limits, clock), clock)
    for num_prompt in (4, 12):
        engine.add(make_request(num_prompt, max_tokens=3, ignore_eos=True))
    while engine.has_requests and clock.now() == 0.0:
        engine.step()
    before_s = clock.now()
    engine.step()
    expected_s = model.step_s(StepShape(2, 5 + 13, skew_tokens=8))
    assert clock.now() - before_s == pytest.approx(expected_s)


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    """What is saved reads back as something else, or a file from before the skew no more."""
    path = tmp_path / "m.json"
    model = replace(MODEL, context_skew=0.5)
    model.save(path)
    assert CostModel.load(path) == model
    path.write_text(json.dumps(_without("context_skew")))
    assert CostModel.load(path) == MODEL


@pytest.mark.parametrize("name", cost_model_names())
def test_each_model_that_ships_has_a_source_and_an_error(name: str) -> None:
    """A shipped file is broken, is named otherwise than its content, or hides where it is from."""
    model = CostModel.load(name)
    assert model.name == name and model.source
    assert model.fit_error["all"]["median_pct"] < 5.0
    # A token costs less in a batch, and a chunk of 512 more than a decode.
    one, many = model.step_s(StepShape(1, 1024)), model.step_s(StepShape(64, 64 * 1024))
    assert one < many < 64 * one
    assert model.step_s(StepShape(0, 0, ((512, 0),))) > one


def test_the_gpus_of_the_plan_are_there() -> None:
    """A GPU that the documentation offers has no file."""
    assert {"a100-llama2-7b", "a100-llama3-8b", "h100-llama2-7b", "h100-llama3-8b"} < set(
        cost_model_names()
    )
    assert {"rtx4090-llama3-8b", "rtxpro6000-llama3-8b"} < set(cost_model_names())


def test_composed_kernel_times_come_out_again() -> None:
    """A coefficient was carried over wrongly: these are the times the fits were made of, in ms."""
    model = CostModel.load("a100-llama3-8b")
    for shape, expected_ms in (
        (StepShape(1, 1024), 11.06),
        (StepShape(32, 32 * 1024), 15.57),
        (StepShape(128, 128 * 1024), 25.0),
        (StepShape(0, 0, ((512, 0),)), 36.86),
        (StepShape(0, 0, ((2048, 0),)), 154.04),
        (StepShape(31, 31 * 1024, ((481, 1024),)), 42.28),
    ):
        assert model.step_s(shape) * 1e3 == pytest.approx(expected_ms, rel=0.09)


def _without(key: str) -> dict[str, Any]:
    data = asdict(MODEL)
    del data[key]
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        (_without("chunk"), "lacks the key chunk"),
        ({**asdict(MODEL), "speed": 1}, "unknown key speed"),
        ({**asdict(MODEL), "num_kv_tokens": 0}, "num_kv_tokens must be at least 1"),
        ({**asdict(MODEL), "context_skew": -0.1}, "context_skew must be a number, at least 0"),
        ({**asdict(MODEL), "gpu": 7}, "gpu must be a text"),
        ({**asdict(MODEL), "decode": {"fixed_ms": 1}}, "decode: lacks the key per_decode_ms"),
        (
            {**asdict(MODEL), "decode": {**asdict(MODEL.decode), "fixed_ms": -1}},
            "decode.fixed_ms must be a number, at least 0",
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, data: Any, message: str) -> None:
    """A misspelled or negative coefficient is taken for another, or ends in a traceback."""
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CostModelError, match=message) as refused:
        CostModel.load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """A typing error ends in a traceback, or says nothing of what there is."""
    with pytest.raises(CostModelError, match="h100-llama3-8b"):
        CostModel.load("h200-llama3-8b")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(CostModelError, match="is not JSON"):
        CostModel.load(tmp_path / "text.json")


def test_an_engine_over_the_simulated_gpu_spends_the_models_time() -> None:
    """The executor takes another step's time, counts a prompt's chunk as decodes, or samples for a
    request whose prompt is not complete.
    """
    clock = VirtualClock(100.0)
    limits = make_limits()
    config = SchedulerConfig(chunk_size=8, overlap_ratio=0.0, max_num_seqs=8)
    engine = Engine.build(config, CacheConfig(), SimExecutor(MODEL, limits, clock), clock)
    engine.add(make_request(12, max_tokens=2, ignore_eos=True))
    assert engine.step() == []
    at_s = 100.0 + step_ms(0, 0, (6, 0)) / 1e3
    assert clock.now() == pytest.approx(at_s)
    assert len(engine.step()) == 1
    at_s += step_ms(0, 0, (6, 6)) / 1e3
    assert clock.now() == pytest.approx(at_s)
    assert engine.step()[0].finish_reason is not None
    assert clock.now() == pytest.approx(at_s + step_ms(1, 13) / 1e3)


def test_the_simulator_needs_neither_torch_nor_ray() -> None:
    """Planning a fleet loads gigabytes that it has no use for."""
    code = (
        "import sys, deployments.execution.sim_executor, deployments.engine.engine\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_installed_package_has_the_models() -> None:
    """They lie outside the package, or the wheel leaves them out: no name is known once installed;
    or the place that the documentation names is empty.
    """
    package = Path(deployments.__file__).parent
    assert COST_MODELS_DIR.is_relative_to(package)
    pattern = COST_MODELS_DIR.relative_to(package).as_posix() + "/*.json"
    assert f'"{pattern}"' in Path("pyproject.toml").read_text()
    shown = {path.stem for path in Path("configs/cost_models").glob("*.json")}
    assert shown == set(cost_model_names()) != set()
