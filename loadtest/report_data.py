"""What a result keeps for pictures: curves of latencies, counts over time, a sample of steps.

Owns the `report` section of a result file, written and read. It is JSON of bounded size, so that
runs of different days and tools can be drawn together. `charts` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from loadtest.distribution import Distribution
from loadtest.measures import Summary
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


@dataclass(frozen=True, slots=True)
class Run:
    """One result file: its name in legends, and what it holds."""

    label: str
    result: Json

    def part(self, name: str) -> Json:
        """A part of its `report` section; empty if it has none."""
        return dict(self.result.get("report", {}).get(name, {}))

    def bound_ms(self, metric: str) -> float | None:
        """The SLO's bound on a metric, in ms; None: no bound."""
        bounds = dict(bound.split(":", 1) for bound in self.result.get("slo") or ())
        return float(bounds[metric]) if metric in bounds else None


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
