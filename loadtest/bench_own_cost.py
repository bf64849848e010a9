"""What a step costs beside the model, from one running request to a thousand: a table and a plot.

    scheduling    schedule and update; recording the step apart
    inputs        the step as tensors, and the plan of its attention
    sampling      by what requests ask for
    streaming     a token of each request on its way to its client (CPU time, the scheduler's part
                  left out)

No model runs. Each part is measured by itself, over the product's own code; `own_cost` holds how.
Every cost should be a straight line: so much a step, so much a running request.

    chunkserve bench own-cost --save-result loadtest/results/own_cost.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deployments.execution.startup import made_to_stay
from loadtest.bench_scheduler import measure_scheduler
from loadtest.charts import Chart, draw_lines
from loadtest.own_cost.growth import fit_line
from loadtest.own_cost.model_side import SAMPLINGS, measure_inputs, measure_sampling
from loadtest.provenance import keep_result, origin

SIZES = (1, 16, 64, 256, 1024)
SCHEDULING = "schedule + update"
STREAMING = "streaming"
MAX_SCHEDULING_US = 4.0
"""Of each running request and step, at most."""
Json = dict[str, Any]
Costs = dict[str, dict[int, float]]
"""Microseconds of a step, by part and by number of running requests."""


def measure(sizes: Sequence[int], report: Callable[[str], None]) -> Costs:
    """All parts at all sizes."""
    costs: Costs = {}

    def note(part: str, num_running: int, cost_us: float) -> None:
        costs.setdefault(part, {})[num_running] = cost_us
        report(f"{part}, {num_running} running: {cost_us:.0f} us a step")

    for num_running in sizes:
        scheduling = measure_scheduler(num_running)
        note(SCHEDULING, num_running, scheduling.us_per_step)
        note("record", num_running, scheduling.log_us)
    for num_running in sizes:
        note("inputs", num_running, measure_inputs(num_running))
        for name, params in SAMPLINGS.items():
            note(f"sampling, {name}", num_running, measure_sampling(num_running, params))
    # Brings Serve and FastAPI along, which the parts before do not need.
    from loadtest.own_cost.streaming import measure_streaming

    for num_running in sizes:
        beside_us = costs[SCHEDULING][num_running] + costs["record"][num_running]
        note(STREAMING, num_running, max(0.0, measure_streaming(num_running) - beside_us))
    return costs


def run_bench(sizes: Sequence[int], report: Callable[[str], None]) -> Json:
    """The costs of all parts and the lines through them, and where they were measured.

    Raises:
        ValueError: fewer than two sizes.
    """
    with made_to_stay():
        torch.set_num_threads(1)
    costs = measure(sizes, report)
    return {
        **origin(),
        "num_threads": torch.get_num_threads(),
        "us_per_step": {
            part: {str(size): round(cost, 1) for size, cost in by_size.items()}
            for part, by_size in costs.items()
        },
        "lines": {
            part: {name: round(value, 3) for name, value in asdict(fit_line(by_size)).items()}
            for part, by_size in costs.items()
        },
    }


def table(result: Json) -> str:
    """The result for readers: microseconds a running request and step, and the lines."""
    parts: dict[str, dict[str, float]] = result["us_per_step"]
    sizes = list(next(iter(parts.values())))
    rows = [["us a request and step", *sizes, "line: a step", "a request", "deviation"]]
    for part, by_size in parts.items():
        line = result["lines"][part]
        each = [f"{by_size[size] / int(size):.2f}" for size in sizes]
        fitted = [f"{line['fixed_us']:.0f}", f"{line['us_per_request']:.2f}"]
        rows.append([part, *each, *fitted, f"{line['worst_deviation']:.0%}"])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in pairs)
        for pairs in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    )


def verdict(result: Json) -> str:
    """Whether scheduling keeps its bound."""
    by_size = result["us_per_step"][SCHEDULING]
    each = {int(size): cost / int(size) for size, cost in by_size.items()}
    over = [f"{cost:.1f} at {size}" for size, cost in each.items() if cost > MAX_SCHEDULING_US]
    bound = f"{SCHEDULING}: {MAX_SCHEDULING_US:g} us a running request"
    return f"{bound} is kept at every size" if not over else f"{bound} is passed: {', '.join(over)}"


def draw(result: Json) -> Chart:
    """All parts over the number of running requests."""
    lines = {
        part: ([int(size) for size in by_size], list(by_size.values()))
        for part, by_size in result["us_per_step"].items()
    }
    return draw_lines(
        "own_cost", "Cost of a step beside the model", lines, "running requests", "µs a step"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="running requests"
    )
    parser.add_argument(
        "--save-result",
        type=Path,
        help="keep it in this .json file, and the plot beside it",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the table."""
    sizes = sorted(set(arguments.sizes))
    if len(sizes) < 2 or sizes[0] < 1:
        print("bench own-cost: --sizes needs two different numbers from 1 on", file=sys.stderr)
        return 2
    result = run_bench(sizes, lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
        arguments.save_result.with_suffix(".png").write_bytes(draw(result).png)
    print(json.dumps({name: result[name] for name in ("date", "machine", "command")}, indent=2))
    print(table(result))
    print(verdict(result))
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
