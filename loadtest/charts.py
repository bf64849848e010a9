"""The pictures of a report, drawn from result files.

Owns how they look: one colour a run, the same in every picture; a bound of the SLO is a dashed
line, what missed it is hollow or a cross. Each function draws one picture and returns None where no
run has what it shows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from loadtest.report_data import Run

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
DECODE, PREFILL, GREY = "#2563eb", "#f59e0b", "#6b7280"
WIDTH_IN, HEIGHT_IN, ROW_IN, DPI = 9.0, 3.6, 0.19, 110
FEW_TIMES, MANY_TIMES = 6.0, 3000.0
"""Between them, a logarithmic axis has figures at 1, 2 and 5 of each decade."""
MAX_POINTS = 240
"""Of a line over time; more are averaged."""
IDLE_GAPS, IDLE_SHARE = 10, 1 / 30
"""A replica without a step for longer than so many usual gaps, and so much of the run, is idle."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: its file name, its title, and the PNG itself."""

    name: str
    title: str
    png: bytes


def draw_all(runs: Sequence[Run]) -> list[Chart]:
    """All pictures for which these runs have anything."""
    charts: list[Chart | None] = [
        _curve(runs, "ttft", "Time to first token"),
        _curve(runs, "itl", "Gaps between tokens"),
        _curve(runs, "e2el", "Time to the end of the answer"),
        _over_time(runs, "throughput", "Output tokens per second", _tokens_per_s),
        _over_time(runs, "open", "Requests that came and have not ended", _num_open),
        _over_time(runs, "waiting", "Requests waiting in a replica (mean)", _steps("num_waiting")),
        _over_time(runs, "kv", "KV cache in use, % (mean)", _steps("kv_use", 100.0)),
        *(_composition(runs, number) for number in range(len(runs))),
        *(_by_replicas(runs, number, "ttft") for number in range(len(runs))),
        *(_by_replicas(runs, number, "itl") for number in range(len(runs))),
        _sweep(runs, "ttft", "Time to first token by rate"),
        _sweep(runs, "itl", "Gap between tokens by rate"),
    ]
    return [chart for chart in charts if chart is not None]


Line = tuple[Sequence[float], Sequence[float]]
"""x and y."""


def draw_lines(
    name: str, title: str, lines: Mapping[str, Line], x_label: str, y_label: str
) -> Chart:
    """Lines by their legends, both axes logarithmic: what grows in proportion runs diagonally."""
    figure, axes = _canvas(title, x_label, y_label)
    for number, (label, (x, y)) in enumerate(lines.items()):
        axes.plot(x, y, "o-", color=_colour(number), label=label, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    return _chart(figure, axes, name, title)


# --- kinds of pictures ----------------------------------------------------------------------------


def _curve(runs: Sequence[Run], metric: str, title: str) -> Chart | None:
    figure, axes = _canvas(title, "ms", "share of all, %")
    has_any = False
    for number, run in enumerate(runs):
        values = run.part("curves_ms").get(metric) or []
        if values:
            has_any = True
            percents = run.result["report"]["percents"]
            axes.plot(np.maximum(values, 0.01), percents, color=_colour(number), label=run.label)
    if not has_any:
        return None
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.axhline(99, color=GREY, linewidth=0.8, linestyle=":")
    beside = axes.get_yaxis_transform()
    axes.text(1.003, 99, "P99", transform=beside, fontsize=8, color=GREY, va="center")
    _mark_bounds(axes.axvline, runs, metric)
    return _chart(figure, axes, f"cdf_{metric}", f"{title}: cumulative distribution")


Series = Callable[[Run], tuple[Sequence[float], Sequence[float]] | None]


def _over_time(runs: Sequence[Run], name: str, title: str, series: Series) -> Chart | None:
    figure, axes = _canvas(title, "seconds of the run", "")
    found = [(number, run, series(run)) for number, run in enumerate(runs)]
    drawn = [(number, run, points) for number, run, points in found if points is not None]
    if not drawn:
        return None
    for number, run, (times_s, values) in drawn:
        axes.plot(times_s, values, color=_colour(number), label=run.label, linewidth=1.2)
    # A line of zeros stands on an axis of whole numbers.
    axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
    axes.set_xlim(left=0)
    return _chart(figure, axes, f"time_{name}", f"{title} over time")


def _composition(runs: Sequence[Run], number: int) -> Chart | None:
    steps = runs[number].part("steps")
    if not steps:
        return None
    title = f"Tokens in a step (mean){_whose(runs, number)}"
    figure = _figure()
    # Apart, for a prompt has a hundred times the tokens of a decode.
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, kind, colour in ((upper, "decode", DECODE), (lower, "prefill", PREFILL)):
        times_s, tokens = _with_idle(steps["time_s"], steps[f"num_{kind}_tokens"])
        axes.fill_between(times_s, tokens, color=colour, alpha=0.85, label=kind, linewidth=0)
        _dress(axes, "", f"{kind} tokens")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _write_plainly(axes.yaxis)
    upper.set_title(title, fontsize=11, loc="left")
    lower.set_xlabel("seconds of the run")
    return _saved(figure, f"steps_{number}", f"{title}, over time")


def _sweep(runs: Sequence[Run], metric: str, title: str) -> Chart | None:
    """Of each run the percentile that has to keep its SLO."""
    figure, axes = _canvas(title, "requests per second", "ms")
    has_any = False
    for number, run in enumerate(runs):
        percentile = f"{run.result.get('slo_percentile', 99):g}"
        label = f"{run.label}, P{percentile}"
        has_any |= _plot_tried(axes, run, f"p{percentile}_{metric}_ms", _colour(number), label)
    if not has_any:
        return None
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _mark_bounds(axes.axhline, runs, metric)
    return _chart(figure, axes, f"rate_{metric}", title)


def _by_replicas(runs: Sequence[Run], number: int, metric: str) -> Chart | None:
    """What a plan tried: above, which step budgets served with how many GPUs; below, the latencies
    of the tries that went to their end, for one that has failed for sure ends early.
    """
    key = f"p99_{metric}_ms"
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for trial in runs[number].result.get("trials") or ():
        name = f"budget {trial['max_num_batched_tokens']}, chunk {trial['chunk_size']}"
        settings.setdefault(name, []).append(trial)
    if not any(trial.get(key) for tried in settings.values() for trial in tried):
        return None
    title = f"P99 {metric.upper()} by number of GPUs{_whose(runs, number)}"
    figure = _figure(HEIGHT_IN + ROW_IN * len(settings))
    heights = (ROW_IN * len(settings), HEIGHT_IN - 1.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for place, tried in enumerate(settings.values()):
        told = sorted((each["num_replicas"], each[key]) for each in tried if each.get(key))
        points = np.array(told).reshape(-1, 2)
        lower.plot(points[:, 0], points[:, 1], "o-", color=_colour(place), markersize=5)
        for marker, is_served in (("o", True), ("x", False)):
            at = [
                each["num_replicas"] for each in tried if bool(each.get("meets_slo")) == is_served
            ]
            upper.plot(at, [place] * len(at), marker, color=_colour(place), markersize=5)
    _dress(upper, "", "")
    upper.set_title(f"{title} (dot: within the SLO, cross: not)", fontsize=11, loc="left")
    upper.set_yticks(range(len(settings)), list(settings), fontsize=8)
    upper.set_ylim(len(settings) - 0.5, -0.5)
    _dress(lower, "GPUs", "ms")
    lower.set_yscale("log")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    lower.margins(x=0.03, y=0.1)
    _mark_bounds(lower.axhline, runs[number : number + 1], metric)
    return _chart(figure, lower, f"replicas_{metric}_{number}", title, least_labels=1)


def _plot_tried(axes: Axes, run: Run, key: str, colour: str, label: str) -> bool:
    """Latencies of a search by rate, hollow where the rate was not sustained; whether there are
    any.
    """
    tried = [each for each in run.result.get("sweep") or () if each.get(key) is not None]
    rates = np.array([each["request_rate"] for each in tried])
    latencies = np.array([max(each[key], 0.01) for each in tried])
    failed = np.array([not each.get("is_sustained", True) for each in tried], dtype=bool)
    if tried:
        axes.plot(rates, latencies, "o-", color=colour, label=label, markersize=5)
    if failed.any():
        axes.plot(
            rates[failed],
            latencies[failed],
            "o",
            color=colour,
            markersize=5,
            markerfacecolor="white",
            label=f"{label}, not sustained",
        )
    return bool(tried)


# --- what is drawn over time ----------------------------------------------------------------------


def _tokens_per_s(run: Run) -> tuple[Sequence[float], Sequence[float]] | None:
    timeline = run.part("timeline")
    if not timeline:
        return None
    rates = np.asarray(timeline["num_output_tokens"]) / timeline["bin_s"]
    return _averaged(np.arange(len(rates)) * timeline["bin_s"], rates)


def _num_open(run: Run) -> tuple[Sequence[float], Sequence[float]] | None:
    timeline = run.part("timeline")
    if not timeline:
        return None
    counts = timeline["num_open"]
    return _averaged(np.arange(len(counts)) * timeline["bin_s"], counts)


def _steps(field: str, scale: float = 1.0) -> Series:
    def series(run: Run) -> tuple[Sequence[float], Sequence[float]] | None:
        steps = run.part("steps")
        return _with_idle(steps["time_s"], np.asarray(steps[field]) * scale) if steps else None

    return series


def _with_idle(
    times_s: Sequence[float], values: Iterable[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """As `_averaged`, and 0 where there were no steps for long: a line from the last step before to
    the first one after would say that something ran.
    """
    times = np.asarray(times_s, dtype=float)
    if len(times) < 2:
        return _averaged(times, values)
    gaps = np.diff(times)
    span_s = float(times[-1] - times[0])
    longest = max(IDLE_GAPS * float(np.median(gaps)), span_s * IDLE_SHARE)
    # Beside the points that stand for a span around them, not between those.
    edge_s = span_s / MAX_POINTS
    places = np.flatnonzero(gaps > longest)
    found_s, found = _averaged(times, values)
    ends = [(times[place] + edge_s, times[place + 1] - edge_s) for place in places]
    zeros = [(float(end_s), 0.0) for pair in ends for end_s in pair]
    points = sorted([*zip(found_s, found, strict=True), *zeros])
    return [time_s for time_s, _ in points], [value for _, value in points]


def _averaged(
    times_s: Iterable[float], values: Iterable[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """At most MAX_POINTS of them: means over equal spans of time."""
    times, given = np.asarray(list(times_s), dtype=float), np.asarray(list(values), dtype=float)
    if len(times) <= MAX_POINTS:
        return times.tolist(), given.tolist()
    edges = np.linspace(times.min(), times.max(), MAX_POINTS + 1)
    places = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, MAX_POINTS - 1)
    counts = np.bincount(places, minlength=MAX_POINTS)
    is_filled = counts > 0
    means = np.bincount(places, given, MAX_POINTS)[is_filled] / counts[is_filled]
    middles = ((edges[:-1] + edges[1:]) / 2)[is_filled]
    return middles.tolist(), means.tolist()


# --- looks ----------------------------------------------------------------------------------------


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _canvas(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = _figure()
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, loc="left")
    _dress(axes, x_label, y_label)
    return figure, axes


def _figure(height_in: float = HEIGHT_IN) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")


def _dress(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _write_plainly(axis: Axis) -> None:
    """2,000 rather than 2 x 10^3, and as many of them as a reader needs."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if axis.get_scale() != "log":
        return
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    if high < FEW_TIMES * low:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if high < MANY_TIMES * low else (1.0,))
        )


def _whose(runs: Sequence[Run], number: int) -> str:
    """For titles: which of several runs it is."""
    return f": {runs[number].label}" if len(runs) > 1 else ""


def _mark_bounds(line: Callable[..., Any], runs: Sequence[Run], metric: str) -> None:
    bounds = {bound for run in runs if (bound := run.bound_ms(metric)) is not None}
    for bound in sorted(bounds):
        line(bound, color="#111827", linewidth=1.1, linestyle="--", label=f"SLO {bound:g} ms")


def _chart(figure: Figure, axes: Axes, name: str, title: str, least_labels: int = 2) -> Chart:
    """A single line is what the title says: no legend below `least_labels` names."""
    for axis in (axes.xaxis, axes.yaxis):
        _write_plainly(axis)
    if len(axes.get_legend_handles_labels()[1]) >= least_labels:
        axes.legend(fontsize=8, frameon=False, loc="best")
    return _saved(figure, name, title)


def _saved(figure: Figure, name: str, title: str) -> Chart:
    png = io.BytesIO()
    # Without the library's version, so that equal results give equal files.
    figure.savefig(png, format="png", metadata={"Software": None})
    return Chart(name, title, png.getvalue())
