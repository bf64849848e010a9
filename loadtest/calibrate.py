"""Fits a cost model to the step log of a running engine, so that one's own machine can be
simulated.

Owns the fit: decode steps and steps with a chunk apart, by the formula of `cost_model`. The log is
what an engine writes with `execution.step_log_dir` set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deployments.execution.cost_model import ChunkCost, CostModel, DecodeCost, StepShape
from loadtest.least_squares import Array, Fit, fit_relative
from loadtest.provenance import check_can_keep

MIN_STEPS = 20
"""Of each kind: fewer tell less than the formula has coefficients."""
NUM_KNEES = 24
NUM_REFINEMENTS = 30


class CalibrationError(ValueError):
    """A log that no model can be fitted to; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step and the seconds it took."""

    shape: StepShape
    step_s: float


def read_step_log(path: Path) -> list[LoggedStep]:
    """The steps of a log.

    Raises:
        CalibrationError: a line is no step.
        OSError: the file cannot be read.
    """
    # What is no text is told as a line that is no step.
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [
            _parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        ]


def _parse(line: str, where: str) -> LoggedStep:
    try:
        data = json.loads(line)
        prefills = tuple((int(new), int(computed)) for new, computed in data["prefills"])
        shape = StepShape(int(data["num_decodes"]), int(data["decode_context_tokens"]), prefills)
        step_s = float(data["step_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"{where}: is no step of an engine; give a log that one wrote with "
            "execution.step_log_dir set"
        ) from error
    return LoggedStep(shape, step_s)


def fit_decode(steps: Sequence[LoggedStep]) -> DecodeCost:
    """The cost of steps without a chunk.

    Raises:
        CalibrationError: there are too few of them.
    """
    _check_number(steps, "without a prompt chunk")
    shapes = [step.shape for step in steps]
    features = np.array([(1.0, s.num_decodes, s.decode_context_tokens) for s in shapes])
    fixed, per_decode, per_context = fit_relative(features, _milliseconds(steps)).coefficients
    return DecodeCost(float(fixed), float(per_decode), float(per_context))


def fit_chunk(steps: Sequence[LoggedStep]) -> ChunkCost:
    """The cost of steps with a chunk. The knee, up to which tokens are free since the weights have
    to be read anyway, is searched: for each, the rest is linear.

    Raises:
        CalibrationError: there are too few of them.
    """
    _check_number(steps, "with a prompt chunk")
    values = _milliseconds(steps)
    rows = np.array([_chunk_features(step.shape) for step in steps])
    num_tokens = rows[:, 0]

    def fit_at(knee: float) -> Fit:
        columns = (np.ones(len(rows)), np.maximum(num_tokens, knee), *rows.T[1:])
        return fit_relative(np.stack(columns, axis=1), values)

    knee = _find_best(lambda knee: fit_at(knee).loss, _knees(num_tokens))
    fixed, per_token, *rest = (float(x) for x in fit_at(knee).coefficients)
    return ChunkCost(fixed, per_token * knee, per_token, *rest)


def _chunk_features(shape: StepShape) -> tuple[float, ...]:
    """Tokens, context, decodes, pairs and attended tokens, as ChunkCost names their costs."""
    num_new = sum(new for new, _ in shape.prefills)
    num_pairs = sum(new * (computed + (new + 1) / 2) for new, computed in shape.prefills)
    num_attended = sum(new + computed for new, computed in shape.prefills)
    return (
        shape.num_decodes + num_new,
        shape.decode_context_tokens,
        shape.num_decodes,
        num_pairs,
        num_attended,
    )


def _knees(num_tokens: Array) -> list[float]:
    return sorted({0.0, *map(float, np.quantile(num_tokens, np.linspace(0.0, 1.0, NUM_KNEES)))})


def _find_best(loss_at: Callable[[float], float], grid: Sequence[float]) -> float:
    """The best point of a grid, then ever closer between its neighbours."""
    losses = [loss_at(point) for point in grid]
    best = int(np.argmin(losses))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    for _ in range(NUM_REFINEMENTS):
        third = (high - low) / 3
        if loss_at(low + third) <= loss_at(high - third):
            high -= third
        else:
            low += third
    middle = (low + high) / 2
    return middle if loss_at(middle) <= losses[best] else grid[best]


def _check_number(steps: Sequence[LoggedStep], kind: str) -> None:
    if len(steps) < MIN_STEPS:
        raise CalibrationError(
            f"the log has {len(steps)} steps {kind}, at least {MIN_STEPS} are needed: log the "
            "engine for longer, under long and short prompts at several rates"
        )


def _milliseconds(steps: Sequence[LoggedStep]) -> Array:
    return np.array([step.step_s for step in steps]) * 1e3


def fit_error(model: CostModel, steps: Sequence[LoggedStep]) -> dict[str, dict[str, float]]:
    """Median, 95th percentile and largest error of a model in percent of the logged time, by kind
    of step.
    """
    kinds: dict[str, list[float]] = {"all": [], "decode": [], "prefill": [], "mixed": []}
    for step in steps:
        error = abs(model.step_s(step.shape) / step.step_s - 1.0) * 100
        kind = "decode" if not step.shape.prefills else "prefill"
        kinds["mixed" if step.shape.prefills and step.shape.num_decodes else kind].append(error)
        kinds["all"].append(error)
    return {kind: _error_summary(errors) for kind, errors in kinds.items() if errors}


def _error_summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "median_pct": round(float(np.median(errors)), 2),
        "p95_pct": round(float(np.quantile(errors, 0.95)), 2),
        "max_pct": round(float(np.max(errors)), 1),
    }


def calibrate(steps: Iterable[LoggedStep], labels: Mapping[str, Any]) -> CostModel:
    """The cost model of a log.

    Args:
        steps: in any order.
        labels: the fields of CostModel that no log tells: name, model, gpu, source, num_kv_tokens.

    Raises:
        CalibrationError: the log holds too little.
    """
    sound = [step for step in steps if step.step_s > 0.0]
    model = CostModel(
        **labels,
        decode=fit_decode([step for step in sound if not step.shape.prefills]),
        chunk=fit_chunk([step for step in sound if step.shape.prefills]),
        fit_error={},
    )
    return CostModel(
        **labels, decode=model.decode, chunk=model.chunk, fit_error=fit_error(model, sound)
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `chunkserve calibrate`."""
    parser.add_argument(
        "logs", nargs="+", type=Path, help="step logs, as execution.step_log_dir holds them"
    )
    parser.add_argument("--out", type=Path, required=True, help="the cost model's file, JSON")
    parser.add_argument("--name", help="by default that of the file")
    parser.add_argument("--model", default="unnamed", help="what ran; for the reader")
    parser.add_argument("--gpu", default="unnamed", help="on what; for the reader")
    parser.add_argument(
        "--num-kv-tokens", type=int, required=True, help="tokens its KV cache holds"
    )


def main(arguments: argparse.Namespace) -> int:
    """Fit, write the file, print the error."""
    if arguments.num_kv_tokens < 1:
        raise CalibrationError(f"--num-kv-tokens must be at least 1, got {arguments.num_kv_tokens}")
    check_can_keep(arguments.out)
    steps = [step for path in arguments.logs for step in read_step_log(path)]
    model = calibrate(
        steps,
        {
            "name": arguments.name or arguments.out.stem,
            "model": arguments.model,
            "gpu": arguments.gpu,
            "source": f"chunkserve calibrate, {len(steps)} steps",
            "num_kv_tokens": arguments.num_kv_tokens,
        },
    )
    model.save(arguments.out)
    print(f"{arguments.out}: fitted to {len(steps)} steps; error in percent of a step's time:")
    for kind, error in model.fit_error.items():
        figures = "  ".join(f"{name.removesuffix('_pct')} {x:g}" for name, x in error.items())
        print(f"  {kind:8} {figures}")
    return 0
