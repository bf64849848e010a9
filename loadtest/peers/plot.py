"""One picture of the ratios: how many times better ours is than each peer, workload by workload."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from loadtest.peers.figures import FIGURES

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
LEAST_RATIO = 0.01
BAND, GRID, LINE = "#f3f4f6", "#e5e7eb", "#111827"

Gain = tuple[float, float, float]
"""Median, least and greatest of how many times better ours is."""


def draw_ratios(summary: Mapping[str, Any]) -> bytes | None:
    """A PNG with a row for each figure and a mark for each peer; None if there is no ratio.

    Rates are ours over theirs, times theirs over ours: further to the right is always better. A
    line through a mark goes from the least round to the greatest.
    """
    rows = [
        (workload, name, _gains(workload, name, cells))
        for workload, by_figure in summary["ratios"].items()
        for name, cells in by_figure.items()
        if cells
    ]
    if not rows:
        return None
    peers = list(dict.fromkeys(peer for _, _, gains in rows for peer in gains))
    figure = Figure(figsize=(10.0, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    _shade_workloads(axes, [workload for workload, _, _ in rows])
    for place, peer in enumerate(peers):
        # A little apart, so that marks of equal ratios can be seen.
        shift = 0.5 * ((place + 0.5) / len(peers) - 0.5)
        _draw_peer(axes, place, peer, {y + shift: row[2] for y, row in enumerate(rows)})
    axes.axvline(1.0, color=LINE, linewidth=1.0, zorder=2)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(rows)), [f"{row[0]}  {row[1]}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("times better than the peer (left of 1: worse); mark: median, line: all rounds")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    return png.getvalue()


def _shade_workloads(axes: Axes, workloads: Sequence[str]) -> None:
    for place, workload in enumerate(dict.fromkeys(workloads)):
        rows = [y for y, each in enumerate(workloads) if each == workload]
        if place % 2 == 0:
            axes.axhspan(rows[0] - 0.5, rows[-1] + 0.5, color=BAND, zorder=0)


def _draw_peer(axes: Axes, place: int, peer: str, rows: Mapping[float, Mapping[str, Gain]]) -> None:
    found = {y: gains[peer] for y, gains in rows.items() if peer in gains}
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    for y, (_, least, greatest) in found.items():
        axes.plot([least, greatest], [y, y], color=colour, linewidth=1.2, zorder=3)
    medians = [median for median, _, _ in found.values()]
    axes.plot(medians, list(found), marker, color=colour, markersize=5, label=peer, zorder=4)


def _gains(workload: str, name: str, cells: Mapping[str, Any]) -> dict[str, Gain]:
    is_rate = {figure.name: figure.is_rate for figure in FIGURES[workload]}[name]
    return {peer: _gain(cell, is_rate) for peer, cell in cells.items()}


def _gain(cell: Mapping[str, float], is_rate: bool) -> Gain:
    median, least, greatest = (
        max(LEAST_RATIO, cell[key]) for key in ("median", "least", "greatest")
    )
    return (median, least, greatest) if is_rate else (1 / median, 1 / greatest, 1 / least)
