"""One picture of the ratios: how many times better ours is than each peer, workload by workload."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from loadtest.peers.figures import FIGURES

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
LEAST_RATIO = 0.01


def draw_ratios(summary: Mapping[str, Any]) -> bytes | None:
    """A PNG with a bar for each figure and peer; None if there is no ratio.

    Rates are ours over theirs, times theirs over ours: longer to the right is always better.
    """
    rows = [
        (f"{workload} {name}", _gain(workload, name, cells))
        for workload, by_figure in summary["ratios"].items()
        for name, cells in by_figure.items()
        if cells
    ]
    peers = list(dict.fromkeys(peer for _, gains in rows for peer in gains))
    if not rows:
        return None
    figure = Figure(figsize=(9.0, 1.2 + 0.22 * len(rows) * len(peers)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        found = [(y, gains[peer]) for y, (_, gains) in enumerate(rows) if peer in gains]
        heights = [y + (place - (len(peers) - 1) / 2) * height for y, _ in found]
        # Bars begin at 1, where both are equal.
        lengths = [gain - 1.0 for _, gain in found]
        colour = COLOURS[place % len(COLOURS)]
        axes.barh(heights, lengths, height, left=1.0, color=colour, label=peer)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1.0, color="#111827", linewidth=1.0)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times better (right of 1) or worse (left) than the peer, median of rounds")
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    axes.legend(fontsize=8, frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    return png.getvalue()


def _gain(workload: str, name: str, cells: Mapping[str, Any]) -> dict[str, float]:
    is_rate = {figure.name: figure.is_rate for figure in FIGURES[workload]}[name]
    medians = {peer: max(LEAST_RATIO, cell["median"]) for peer, cell in cells.items()}
    return {peer: ratio if is_rate else 1.0 / ratio for peer, ratio in medians.items()}
