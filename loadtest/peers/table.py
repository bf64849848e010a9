"""The benchmark's result as a text of tables, from the data that `summary` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
NONE = "-"


def table_of(summary: Json) -> str:
    """All tables, in the order in which one reads them."""
    services: Json = summary["services"]
    ours, *peers = services
    gaps = _gaps_of(summary)
    parts = [
        ("Services", _services(services)),
        (
            "Figures: median (min to max) over rounds",
            _figures(summary["figures"], list(services), gaps),
        ),
    ]
    if peers:
        title = (
            f"Ratios: {ours} over each, median (min to max) of rounds; "
            "above 1 is better for rates, below 1 for times"
        )
        parts.append((title, _figures(summary["ratios"], peers, gaps)))
    if "limits" in summary:
        parts.append(("Shares of this machine's limits", _limits(summary)))
    parts.append(("Cores in use, median over rounds", _cores(summary["cores"])))
    text = "\n\n".join(f"{title}\n\n{table}" for title, table in parts)
    notes = [
        *_dropped(summary["dropped"]),
        *_failed(summary["failed"]),
        *(f"left out: {why}" for why in summary["left_out"].values()),
    ]
    return "\n".join([text, "", *notes]) if notes else text


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; all but the first stand to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def number(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def spread(values: Json | None, empty: str = NONE) -> str:
    """A median with its range; the median alone of one round; `empty` of none."""
    if values is None:
        return empty
    if values["count"] == 1:
        return number(values["median"])
    least, greatest = number(values["least"]), number(values["greatest"])
    return f"{number(values['median'])} ({least} to {greatest})"


def _services(services: Json) -> str:
    rows = [
        [
            name,
            each["dtype"],
            NONE if each["weight_bytes"] is None else number(each["weight_bytes"] / 1e6),
            number(each["start_s"]),
        ]
        for name, each in services.items()
    ]
    return aligned(["service", "dtype", "weights, MB", "start, s"], rows)


def _gaps_of(summary: Json) -> dict[tuple[str, str], str]:
    """Why a service has no figure of a workload."""
    return {
        (each["workload"], each["service"]): word
        for word in ("dropped", "failed")
        for each in summary[word]
    }


def _figures(figures: Json, names: Sequence[str], gaps: Mapping[tuple[str, str], str]) -> str:
    """A table for each workload, a row for each service: as wide as it has figures, however many
    services there are.
    """
    tables = []
    for workload, by_figure in figures.items():
        rows = []
        for name in names:
            spreads = [cells.get(name) for cells in by_figure.values()]
            why = gaps.get((workload, name))
            if why is not None or any(spreads):
                empty = NONE if any(spreads) else why or NONE
                rows.append([name, *(spread(each, empty) for each in spreads)])
        tables.append(aligned([workload, *by_figure], rows))
    return "\n\n".join(tables)


def _limits(summary: Json) -> str:
    limits, shares = summary["limits"], summary["limit_shares"]
    gemm = ", ".join(
        f"{name} {number(flop / 1e9)} GFLOP/s" for name, flop in limits["gemm_flop_per_s"].items()
    )
    keys = list(dict.fromkeys(key for each in shares.values() for key in each))
    rows = [
        [name, *(f"{each[key]:.0%}" if key in each else NONE for key in keys)]
        for name, each in shares.items()
    ]
    read = number(limits["read_bytes_per_s"] / 1e9)
    return f"{aligned(['', *keys], rows)}\n\nread {read} GB/s; products: {gemm}"


def _cores(cores: Json) -> str:
    rows = [
        [f"{service} {workload}"]
        + [f"{share[key]:.2f}" for key in ("service_cores", "client_cores", "others_cores")]
        + [f"{share['stolen_cores']:.2f}", number(share["taken_s"])]
        for service, by_workload in cores.items()
        for workload, share in by_workload.items()
    ]
    return aligned(["", "service", "client", "others", "stolen", "wall, s"], rows)


def _dropped(dropped: Sequence[Json]) -> list[str]:
    return [
        f"dropped: round {each['round_number']} {each['workload']} {each['service']}: {each['why']}"
        for each in dropped
    ]


def _failed(failed: Sequence[Json]) -> list[str]:
    return [
        f"failed: round {each['round_number']} {each['workload']} {each['service']}: "
        f"not counted, {each['num_failed']} requests: {'; '.join(each['errors'].values())}"
        for each in failed
    ]
