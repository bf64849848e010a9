"""What the requests of one run come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it."""

    intended_s: float
    sent_s: float
    num_prompt_tokens: int
    token_times_s: Sequence[float]
    end_s: float
    num_cached_tokens: int = 0
    error: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None


class Distribution:
    """Values and their quantiles."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """Take in a value."""
        self._values.append(value)

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all do not exceed."""
        return float(np.percentile(self._values, percent))

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self._values))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._values)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to."""

    duration_s: float
    distributions: dict[str, Distribution]
    errors: Counter[str]


class Measures:
    """Takes in records, tells what they come to."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._errors: Counter[str] = Counter()
        self._all = {name: Distribution() for name in ("ttft", "tpot", "itl", "e2el")}

    def add(self, record: RequestRecord) -> None:
        """Take in a request."""
        if record.error is not None:
            self._errors[record.error] += 1
            return
        times = record.token_times_s
        self._all["ttft"].add(times[0] - record.intended_s)
        self._all["e2el"].add(record.end_s - record.intended_s)
        if len(times) > 1:
            self._all["tpot"].add((times[-1] - times[0]) / (len(times) - 1))
        for earlier, later in pairwise(times):
            self._all["itl"].add(later - earlier)

    def summary(self, duration_s: float) -> Summary:
        """What all came to."""
        return Summary(duration_s, self._all, self._errors)


def result_json(summary: Summary) -> dict[str, Any]:
    """With the keys of `vllm bench serve`."""
    result: dict[str, Any] = {
        "duration": summary.duration_s,
        "completed": summary.distributions["ttft"].count,
        "errors": dict(summary.errors),
    }
    for name, values in summary.distributions.items():
        if values.count:
            result[f"mean_{name}_ms"] = values.mean * 1e3
            result[f"median_{name}_ms"] = values.percentile(50) * 1e3
            result[f"p99_{name}_ms"] = values.percentile(99) * 1e3
    return result
