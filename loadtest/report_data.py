"""What a result keeps for pictures: curves of latencies, counts over time, a sample of steps.

Owns the `report` section of a result file, written and read. It is JSON of bounded size, so that
runs of different days and tools can be drawn together. `charts` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from loadtest.distribution import Distribution
from loadtest.measures import MeasuresError, Slo, Summary
from loadtest.timeline import TimelineCounts

CURVES = ("ttft", "itl", "e2el", "tpot", "worst_gap")
PERCENTS = (
    *(float(percent) for percent in range(0, 99)),
    *(99 + tenth / 10 for tenth in range(10)),
    *(99.95, 99.99, 100.0),
)
MAX_STEPS = 3000

Json = dict[str, Any]


class Step(Protocol):
    """A step of a replica, as far as it is drawn. `kv_use` is a share, 0 to 1."""

    @property
    def time_s(self) -> float: ...
    @property
    def num_decode_tokens(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_use(self) -> float: ...


STEP_FIELDS = (
    "time_s", "num_decode_tokens", "num_prefill_tokens", "num_running", "num_waiting", "kv_use"
)  # fmt: skip


class ReportError(ValueError):
    """Results that no report can be made of; one line that says what to change."""


TIMELINE_COLUMNS = ("num_output_tokens", "num_open")


@dataclass(frozen=True, slots=True)
class Run:
    """One result: its name in legends, and what it holds.

    Raises:
        ReportError: a part that pictures are made of is not of the form `report_section` gives it.
    """

    label: str
    result: Json

    def __post_init__(self) -> None:
        broken = next((name for name, is_sound in self._soundness() if not is_sound), None)
        if broken is not None:
            raise ReportError(
                f"{self.label}: its {broken} cannot be read; give a file as --save-result wrote it"
            )

    def _soundness(self) -> Iterator[tuple[str, bool]]:
        """Parts of the result, and whether each is as it should be; absent ones are."""
        report = self.result.get("report", {})
        yield "report", isinstance(report, dict)
        curves, percents = report.get("curves_ms", {}), report.get("percents", [])
        yield (
            "report.curves_ms",
            isinstance(curves, dict)
            and all(
                _are_numbers(curve) and len(curve) in (0, len(percents))
                for curve in curves.values()
            ),
        )
        for name, columns in (("timeline", TIMELINE_COLUMNS), ("steps", STEP_FIELDS)):
            part = report.get(name)
            yield f"report.{name}", part is None or _is_table(part, columns)
        yield "slo", _are_bounds(self.result.get("slo") or [])
        for name in ("sweep", "trials"):
            yield name, _are_rows(self.result.get(name) or [])

    def part(self, name: str) -> Json:
        """A part of its `report` section; empty if it has none."""
        return dict(self.result.get("report", {}).get(name, {}))

    def bound_ms(self, metric: str) -> float | None:
        """The SLO's bound on a metric, in ms; None: no bound."""
        bounds = dict(bound.split(":", 1) for bound in self.result.get("slo") or ())
        return float(bounds[metric]) if metric in bounds else None


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, int | float) for value in values)


def _is_table(part: object, columns: Sequence[str]) -> bool:
    if not isinstance(part, dict) or not all(_are_numbers(part.get(name)) for name in columns):
        return False
    return len({len(part[name]) for name in columns}) == 1


def _are_bounds(bounds: object) -> bool:
    if not isinstance(bounds, list):
        return False
    try:
        Slo.parse([str(bound) for bound in bounds])
    except MeasuresError:
        return False
    return True


def _are_rows(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def report_section(
    summary: Summary, timeline: TimelineCounts | None = None, steps: Sequence[Step] = ()
) -> Json:
    """The `report` of a result file.

    Args:
        summary: of the run.
        timeline: its counts over time, where they were taken.
        steps: of its replicas, ascending in time; of more than MAX_STEPS every k-th is kept.
    """
    section: Json = {
        "curves_ms": {name: _curve_ms(summary.distributions[name]) for name in CURVES},
        "percents": list(PERCENTS),
    }
    if timeline is not None:
        section["timeline"] = asdict(timeline) | {"num_open": timeline.num_open}
    if steps:
        kept = steps[:: -(-len(steps) // MAX_STEPS)]
        section["steps"] = {
            name: [round(getattr(step, name), 4) for step in kept] for name in STEP_FIELDS
        }
    return section


def _curve_ms(values: Distribution) -> list[float]:
    if not values.count:
        return []
    return [round(value * 1e3, 4) for value in values.percentiles(PERCENTS)]
