"""One page of one or several results, with pictures, that needs no other file.

    chunkserve report a.json b.json --output report.html

Reads what `bench load`, `bench capacity`, `simulate` and `plan` saved. The pictures are in the
page, and as PNGs in a folder beside it.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.measures import DEFINITIONS
from loadtest.provenance import check_can_keep
from loadtest.report_data import ReportError, Run

if TYPE_CHECKING:
    from loadtest.charts import Chart

FIGURES = (
    ("capacity", "highest rate sustained, requests/s", "{:,.2f}"),
    ("lowest_rate_not_sustained", "lowest rate not sustained, requests/s", "{:,.2f}"),
    ("completed", "requests completed", "{:,.0f}"),
    ("failed", "requests failed", "{:,.0f}"),
    ("request_throughput", "requests/s", "{:,.2f}"),
    ("request_goodput", "requests/s within the SLO", "{:,.2f}"),
    ("output_throughput", "output tokens/s", "{:,.0f}"),
    ("total_token_throughput", "tokens/s, prompts included", "{:,.0f}"),
    ("median_ttft_ms", "TTFT P50, ms", "{:,.0f}"),
    ("p99_ttft_ms", "TTFT P99, ms", "{:,.0f}"),
    ("mean_tpot_ms", "TPOT mean, ms", "{:,.1f}"),
    ("median_itl_ms", "ITL P50, ms", "{:,.1f}"),
    ("p99_itl_ms", "ITL P99, ms", "{:,.1f}"),
    ("max_worst_gap_ms", "longest gap, ms", "{:,.0f}"),
    ("median_e2el_ms", "E2E P50, ms", "{:,.0f}"),
    ("p99_e2el_ms", "E2E P99, ms", "{:,.0f}"),
    ("p99_lag_ms", "client lag P99, ms", "{:,.1f}"),
    ("num_replicas", "GPUs", "{:,.0f}"),
    ("max_num_batched_tokens", "max_num_batched_tokens", "{:.0f}"),
    ("chunk_size", "chunk_size", "{:.0f}"),
    ("gpu_utilization", "GPUs busy", "{:.0%}"),
    ("gpu_utilization_prefill", "of it in prefill", "{:.0%}"),
    ("gpu_utilization_decode", "of it in decode", "{:.0%}"),
    ("cost_per_hour", "cost per hour", "{:,.2f}"),
    ("cost_per_million_output_tokens", "cost per million output tokens", "{:,.2f}"),
)
"""Key of the result, what the table calls it, how it is written."""
ORIGIN = ("date", "machine", "command")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; margin: 2rem auto; max-width: 62rem;
       padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; } pre { background: #f9fafb; padding: 1rem;
white-space: pre-wrap; font-size: 13px; } .warning { background: #fef3c7; padding: .5rem 1rem; }
"""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The results of these files, each named by its own `label` or its file.

    Raises:
        ReportError: a file is missing or is no result.
    """
    runs: list[Run] = []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"{path}: cannot be read as a result ({error})") from error
        parts = result.get("pools", [result]) if isinstance(result, dict) else []
        if not _are_results(parts):
            raise ReportError(
                f"{path}: is no result of bench load, bench capacity, simulate or plan; give a "
                "file that --save-result wrote"
            )
        runs += [Run(str(part.get("label") or path.stem), part) for part in parts]
    return runs


def _are_results(parts: object) -> bool:
    if not isinstance(parts, list) or not parts:
        return False
    return all(isinstance(part, dict) and {"completed", "sweep"} & set(part) for part in parts)


def render(runs: Sequence[Run], charts: Sequence[Chart], title: str) -> str:
    """The page."""
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *_warnings(runs),
        _table(runs),
        *(_figure(chart) for chart in charts),
        "<h2>Where the figures come from</h2>",
        _origins(runs),
        "<h2>What they mean</h2>",
        f"<pre>{html.escape(DEFINITIONS)}</pre>",
    ]
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"


def _warnings(runs: Sequence[Run]) -> list[str]:
    return [
        f"<p class='warning'>{html.escape(run.label)} is saturated: its queue grew to the end, so "
        "its latencies tell how long the run was, not how fast the system is.</p>"
        for run in runs
        if run.result.get("is_saturated")
    ]


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{html.escape(run.label)}</th>" for run in runs)
    rows = [_slo_row(runs)] if any(run.result.get("slo") for run in runs) else []
    for key, name, form in FIGURES:
        values = [run.result.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = "".join(f"<td>{_written(value, form)}</td>" for value in values)
            rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def _slo_row(runs: Sequence[Run]) -> str:
    bounds = [" ".join(run.result.get("slo") or ()) or "–" for run in runs]
    cells = "".join(f"<td>{html.escape(each)}</td>" for each in bounds)
    return f"<tr><td>SLO, ms</td>{cells}</tr>"


def _written(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "–"


def _figure(chart: Chart) -> str:
    data = base64.b64encode(chart.png).decode()
    title = html.escape(chart.title)
    return f"<figure><img alt='{title}' src='data:image/png;base64,{data}'></figure>"


def _origins(runs: Sequence[Run]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(run.label)}</td>"
        + "".join(
            f"<td class='text'>{html.escape(str(run.result.get(key, '–')))}</td>" for key in ORIGIN
        )
        + "</tr>"
        for run in runs
    )
    head = "".join(f"<th class='text'>{key}</th>" for key in ORIGIN)
    return f"<table><tr><th>run</th>{head}</tr>{rows}</table>"


def write_report(runs: Sequence[Run], output: Path, title: str) -> list[Path]:
    """Write the page and its pictures; returns all files, the page first.

    Raises:
        OSError: they cannot be written.
        ReportError: what draws the pictures is not installed.
    """
    try:
        # Here, because no other command needs it and it takes half a second.
        from loadtest.charts import draw_all
    except ModuleNotFoundError as error:
        message = "pictures need matplotlib; pip install 'chunkserve[reports]'"
        raise ReportError(message) from error
    charts = draw_all(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(runs, charts, title), encoding="utf-8")
    folder = output.with_suffix("")
    folder.mkdir(exist_ok=True)
    written = [output]
    for chart in charts:
        path = folder / f"{chart.name}.png"
        path.write_bytes(chart.png)
        written.append(path)
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("results", nargs="+", type=Path, help="files that --save-result wrote")
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    parser.add_argument("--title", default="Load test")


def main(arguments: argparse.Namespace) -> int:
    """Write it, and say where."""
    runs = read_runs(arguments.results)
    check_can_keep(arguments.output)
    for path in write_report(runs, arguments.output, arguments.title):
        print(path)
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
