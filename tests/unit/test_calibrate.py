"""Fitting a cost model to a step log, and the log that an engine writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doubles import make_engine, make_request, run_until_done

from deployments.engine.step_log_file import StepLogFile
from deployments.execution.cost_model import ChunkCost, CostModel, DecodeCost, StepShape
from loadtest.calibrate import (
    CalibrationError,
    LoggedStep,
    calibrate,
    read_step_log,
)
from loadtest.least_squares import solve_nonnegative

LABELS = {"name": "n", "model": "m", "gpu": "g", "source": "s", "num_kv_tokens": 1000}
KNOWN = CostModel(
    **LABELS,
    decode=DecodeCost(6.5, 0.02, 4e-5),
    chunk=ChunkCost(2.0, 7.5, 0.03, 5e-5, 0.008, 9e-7, 2e-4),
    fit_error={},
)


def random_shape(rng: random.Random) -> StepShape:
    num_decodes = rng.choice([0, *range(1, 200)])
    context = num_decodes * rng.randint(10, 4000)
    sizes = [(rng.randint(1, 1024), rng.choice([0, rng.randint(0, 8000)])) for _ in range(3)]
    num_chunks = rng.choice([0, 1, 2, 3]) if num_decodes else rng.choice([1, 2])
    return StepShape(num_decodes, context, tuple(sizes[:num_chunks]))


def make_log(
    noise: Callable[[random.Random], float], num: int = 600, seed: int = 0
) -> list[LoggedStep]:
    rng = random.Random(seed)
    shapes = [random_shape(rng) for _ in range(num)]
    return [LoggedStep(shape, KNOWN.step_s(shape) * noise(rng)) for shape in shapes]


def coefficients(model: CostModel) -> list[float]:
    costs = (model.decode, model.chunk)
    return [getattr(cost, name) for cost in costs for name in cost.__dataclass_fields__]


def test_known_coefficients_come_out_again() -> None:
    """A coefficient lands in another's place, or the knee is missed."""
    model = calibrate(make_log(lambda rng: 1.0), LABELS)
    assert coefficients(model) == pytest.approx(coefficients(KNOWN), rel=0.01)
    assert model.fit_error["all"]["max_pct"] < 0.2


def test_noise_and_outliers_hardly_move_the_fit() -> None:
    """A few steps that waited for something else decide the fit."""

    def noise(rng: random.Random) -> float:
        return rng.uniform(5.0, 20.0) if rng.random() < 0.03 else rng.uniform(0.98, 1.02)

    model = calibrate(make_log(noise), LABELS)
    for shape in (
        StepShape(32, 32_000),
        StepShape(0, 0, ((512, 0),)),
        StepShape(64, 9000, ((256, 99),)),
    ):
        assert model.step_s(shape) == pytest.approx(KNOWN.step_s(shape), rel=0.02)
    assert model.fit_error["all"]["median_pct"] < 2.0 < model.fit_error["all"]["max_pct"]


def test_no_coefficient_is_negative_even_if_the_data_ask_for_it() -> None:
    """A step of a simulated GPU gets shorter by more work, or takes less than no time."""
    rng = random.Random(1)
    # Time falls with context, which no cost model can say.
    steps = [
        LoggedStep(StepShape(n, c), 0.05 - c * 1e-6)
        for n, c in ((rng.randint(1, 9), rng.randint(1, 9000)) for _ in range(50))
    ]
    chunks = [step for step in make_log(lambda rng: 1.0, 200) if step.shape.prefills]
    model = calibrate(steps + chunks, LABELS)
    assert min(coefficients(model)) == 0.0
    assert model.step_s(StepShape(5, 4500)) == pytest.approx(0.0455, rel=0.05)


def test_least_squares_holds_at_zero_what_would_be_negative() -> None:
    """Negative coefficients are cut off after the fit, instead of being fitted around."""
    rng = np.random.default_rng(0)
    features = rng.uniform(0.0, 1.0, (40, 4))
    values = features @ np.array([1.0, -2.0, 0.5, 3.0])
    x = solve_nonnegative(features.T @ features, features.T @ values)
    slope = features.T @ (features @ x - values)
    assert (x >= 0.0).all()
    # Optimal: no way down from where x is 0, level ground elsewhere.
    assert (slope[x == 0.0] >= -1e-9).all() and x[1] == 0.0
    assert slope[x > 0.0] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", ["without", "with"])
def test_a_log_of_one_kind_of_step_is_refused(kind: str) -> None:
    """Half of a model is made up from nothing."""
    log = make_log(lambda rng: 1.0, 200)
    half = [step for step in log if bool(step.shape.prefills) == (kind == "without")]
    with pytest.raises(CalibrationError, match=f"has 0 steps {kind} a prompt chunk"):
        calibrate(half, LABELS)


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"num_decodes": 1}', "[]", '{"prefills": 3}'])
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str) -> None:
    """A wrong file ends in a traceback, or in a fit to half of it."""
    path = tmp_path / "steps.jsonl"
    good = {"num_decodes": 1, "decode_context_tokens": 9, "prefills": [], "step_s": 0.1}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(CalibrationError, match=r"steps\.jsonl:2: is no step"):
        read_step_log(path)


def test_an_engine_writes_what_calibrate_reads(tmp_path: Path) -> None:
    """Decodes, their context or the chunks are logged as something else."""
    path = tmp_path / "new" / "steps.jsonl"
    engine = make_engine(observers=[StepLogFile(path)], chunk_size=8)
    engine.add(make_request(12, max_tokens=3, ignore_eos=True))
    run_until_done(engine)
    shapes = [step.shape for step in read_step_log(path)]
    assert shapes == [
        StepShape(0, 0, ((6, 0),)),
        StepShape(0, 0, ((6, 6),)),
        StepShape(1, 13),
        StepShape(1, 14),
    ]


def test_the_log_of_an_engine_is_bounded(tmp_path: Path) -> None:
    """A service of weeks fills the disk."""
    engine = make_engine(observers=[StepLogFile(tmp_path / "steps.jsonl", max_steps=2)])
    engine.add(make_request(4, max_tokens=9, ignore_eos=True))
    run_until_done(engine)
    assert len(read_step_log(tmp_path / "steps.jsonl")) == 2


def test_a_full_disk_does_not_end_the_engine() -> None:
    """The engine dies of its log."""
    engine = make_engine(observers=[StepLogFile(Path("/dev/full"))])
    request = make_request(4, max_tokens=9, ignore_eos=True)
    engine.add(request)
    assert len(run_until_done(engine)[request.request_id].token_ids) == 9
