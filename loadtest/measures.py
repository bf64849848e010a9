"""What the requests of one run come to: latencies, rates, goodput, errors by kind.

The client and the simulator both end in these records, so that their figures mean the same. Does
not send, schedule or draw anything. `DEFINITIONS` goes with every printed result: the same names
mean other things in other tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.distribution import Distribution
from loadtest.records import MeasuresError, RequestRecord, Slo

__all__ = [
    "DEFINITIONS",
    "METRICS",
    "Distribution",
    "Measures",
    "MeasuresError",
    "RequestRecord",
    "Slo",
    "Summary",
    "result_json",
]

METRICS = ("ttft", "tpot", "itl", "e2el", "worst_gap", "lag")
"""Names of what is measured, as in `Summary.distributions` and the JSON keys."""

DEFINITIONS = """\
TTFT       from the time a request was meant to be sent to its first output token; a client or a
           queue that is late counts
TPOT       (E2E - TTFT) / (output tokens - 1), one value a request of two or more output tokens
ITL        every gap between consecutive output tokens, of all requests together; tokens that
           arrive at once have gaps of zero
E2EL       from the time a request was meant to be sent to its end
worst gap  the longest ITL gap, one value a request of two or more output tokens
lag        from the time a request was meant to be sent to when it was; large values say that the
           client was the bottleneck
goodput    requests that met every bound of the SLO, per second; an ITL bound holds for each gap
rates      completed requests and their tokens, over the time from the first send to the last end
Latencies, tokens and rates are of completed requests; lag is of all, failed requests are counted
by the kind of their error and meet no SLO."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to so far; later records do not change it.

    Args:
        duration_s: over which the rates are.
        slo: that good requests met.
        num_completed: requests without error.
        num_good: of those, within the SLO.
        num_prompt_tokens: of completed requests.
        num_cached_tokens: of those, found in a prefix cache.
        num_output_tokens: of completed requests.
        errors: requests by kind of failure.
        distributions: by the names of `METRICS`, in seconds.
        by_priority: the same of each priority; empty where there is but one.
    """

    duration_s: float
    slo: Slo
    num_completed: int
    num_good: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    errors: Mapping[str, int]
    distributions: Mapping[str, Distribution]
    by_priority: Mapping[int, Summary]

    @property
    def num_failed(self) -> int:
        """Requests that ended in an error."""
        return sum(self.errors.values())

    def per_second(self, amount: float) -> float:
        """A rate over the run; 0 for a run that took no time."""
        return amount / self.duration_s if self.duration_s > 0 else 0.0


class Measures:
    """Takes in the requests of a run one by one, in bounded memory.

    Args:
        slo: by which good requests are told.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._tallies: dict[int, _Tally] = {}

    def add(self, record: RequestRecord) -> None:
        """Take in one request that has ended.

        Raises:
            ValueError: a time is not finite.
        """
        tally = self._tallies.get(record.priority)
        if tally is None:
            tally = self._tallies[record.priority] = _Tally()
        tally.add(record, self._slo)

    def summary(self, duration_s: float) -> Summary:
        """What all requests so far come to, over the seconds they took."""
        tallies = dict(sorted(self._tallies.items()))
        by_priority = {}
        if len(tallies) > 1:
            by_priority = {
                priority: self._summary_of([tally], duration_s, {})
                for priority, tally in tallies.items()
            }
        return self._summary_of(list(tallies.values()), duration_s, by_priority)

    def _summary_of(
        self, tallies: Sequence[_Tally], duration_s: float, by_priority: Mapping[int, Summary]
    ) -> Summary:
        def total(count: Callable[[_Tally], int]) -> int:
            return sum(count(tally) for tally in tallies)

        errors: Counter[str] = Counter()
        for tally in tallies:
            errors.update(tally.errors)
        return Summary(
            duration_s=duration_s,
            slo=self._slo,
            num_completed=total(lambda tally: tally.num_completed),
            num_good=total(lambda tally: tally.num_good),
            num_prompt_tokens=total(lambda tally: tally.num_prompt_tokens),
            num_cached_tokens=total(lambda tally: tally.num_cached_tokens),
            num_output_tokens=total(lambda tally: tally.num_output_tokens),
            errors=dict(errors.most_common()),
            distributions={
                name: Distribution.merged(tally.distributions[name] for tally in tallies)
                for name in METRICS
            },
            by_priority=by_priority,
        )


class _Tally:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.num_completed = 0
        self.num_good = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.errors: Counter[str] = Counter()
        self.distributions = {name: Distribution() for name in METRICS}

    def add(self, record: RequestRecord, slo: Slo) -> None:
        self.distributions["lag"].add(record.lag_s)
        if record.error is not None:
            self.errors[record.error] += 1
            return
        self.num_completed += 1
        self.num_good += slo.is_met(record)
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_output_tokens
        self.distributions["e2el"].add(record.e2e_s)
        gaps_s = record.gaps_s()
        self.distributions["itl"].add_many(gaps_s)
        for name, value in (
            ("ttft", record.ttft_s),
            ("tpot", record.tpot_s),
            ("worst_gap", max(gaps_s, default=None)),
        ):
            if value is not None:
                self.distributions[name].add(value)


def result_json(
    summary: Summary,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
) -> dict[str, Any]:
    """A result with the keys that `vllm bench serve --save-result` writes, and some of our own.

    Where vLLM lists every request's error, `errors` counts them by kind; what was not measured is
    null where vLLM writes 0. Beyond vLLM's: `total_cached_tokens`, `slo`, `by_priority`, and the
    metrics `worst_gap` and `lag`.

    Args:
        summary: of the run.
        metrics: those of `METRICS` to tell.
        percentiles: of each, as in `p99_ttft_ms`.

    Raises:
        MeasuresError: a metric or percentile that there is not.
    """
    _check_wanted(metrics, percentiles)
    result: dict[str, Any] = {
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "total_input_tokens": summary.num_prompt_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "total_cached_tokens": summary.num_cached_tokens,
        "request_throughput": summary.per_second(summary.num_completed),
        "request_goodput": (
            summary.per_second(summary.num_good) if summary.slo.has_bounds else None
        ),
        "output_throughput": summary.per_second(summary.num_output_tokens),
        "total_token_throughput": summary.per_second(
            summary.num_prompt_tokens + summary.num_output_tokens
        ),
        "slo": summary.slo.as_text(),
        "errors": dict(summary.errors),
    }
    for name in metrics:
        result.update(_statistics_ms(name, summary.distributions[name], percentiles))
    if summary.by_priority:
        result["by_priority"] = {
            str(priority): result_json(part, metrics, percentiles)
            for priority, part in summary.by_priority.items()
        }
    return result


def _check_wanted(metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    for name in metrics:
        if name not in METRICS:
            raise MeasuresError(f"no metric {name!r}: choose of {', '.join(METRICS)}")
    for percent in percentiles:
        if not 0 <= percent <= 100:
            raise MeasuresError(f"no percentile {percent:g}: choose numbers within 0 and 100")


def _statistics_ms(
    name: str, values: Distribution, percentiles: Sequence[float]
) -> dict[str, float | None]:
    keys = ("mean", "median", "std", "max", *(f"p{percent:g}" for percent in percentiles))
    figures: list[float | None] = [None] * len(keys)
    if values.count:
        median, *others = values.percentiles([50, *percentiles])
        found = (values.mean, median, values.std, values.greatest, *others)
        figures = [1e3 * value for value in found]
    return {f"{key}_{name}_ms": figure for key, figure in zip(keys, figures, strict=True)}
