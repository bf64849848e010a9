"""What one turn of a workload comes to: which figures it has, and which way they are better.

A figure is computed from the records of one service's requests, by their labels. Medians over
rounds and ratios between services are `ratios`'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.peers.workloads import ALL, FIRST, HIT, LONG, SHORT
from loadtest.records import RequestRecord

Records = Mapping[str, Sequence[RequestRecord]]
"""The completed requests of one turn, by label."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a workload.

    Args:
        name: with its unit, as it stands in tables.
        is_rate: whether more is better; if not, less is.
        compute: it, from the records of one turn; None: they do not have it.
    """

    name: str
    is_rate: bool
    compute: Callable[[Records], float | None]


def figures_of(workload: str, records: Records) -> dict[str, float]:
    """All figures of a workload that its records have, by name."""
    computed = {figure.name: figure.compute(records) for figure in FIGURES[workload]}
    return {name: value for name, value in computed.items() if value is not None}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that so many percent are at or below (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


# --- from records to values -----------------------------------------------------------------------


def _every(records: Records) -> list[RequestRecord]:
    return [record for part in records.values() for record in part]


def _span_s(records: Sequence[RequestRecord]) -> float:
    return max(r.end_s for r in records) - min(r.sent_s for r in records)


def _output_rate(records: Records) -> float | None:
    every = _every(records)
    return sum(r.num_output_tokens for r in every) / _span_s(every) if every else None


def _request_rate(records: Records) -> float | None:
    every = _every(records)
    return len(every) / _span_s(every) if every else None


def _ttft(label: str, percent: float) -> Callable[[Records], float | None]:
    def compute(records: Records) -> float | None:
        times_s = [r.ttft_s for r in records.get(label, ()) if r.ttft_s is not None]
        return percentile(times_s, percent)

    return compute


def _gaps_ms(records: Records, label: str) -> list[float]:
    # An answer that came at once is no stream and has no gaps, rather than gaps of nothing.
    streams = [record for record in records.get(label, ()) if record.worst_gap_s]
    return [gap_s * 1e3 for record in streams for gap_s in record.gaps_s()]


def _itl_ms(label: str, percent: float) -> Callable[[Records], float | None]:
    return lambda records: percentile(_gaps_ms(records, label), percent)


def _worst_gap_s(label: str) -> Callable[[Records], float | None]:
    def compute(records: Records) -> float | None:
        # An answer that came at once has no stream: its longest wait is that for the whole of it.
        waits = [_longest_wait_s(record) for record in records.get(label, ())]
        return max(waits, default=None)

    return compute


def _longest_wait_s(record: RequestRecord) -> float:
    gap_s = record.worst_gap_s
    return gap_s if gap_s else record.e2e_s


def _gap_p99_while_prefilled_s(records: Records) -> float | None:
    """p99 of the gaps of the decodes that overlap the long prompt's wait for its first token."""
    begin_s, end_s = _prefill_span_s(records)
    gaps_s = [
        later - earlier
        for record in records.get(SHORT, ())
        for earlier, later in zip(record.token_times_s, record.token_times_s[1:], strict=False)
        if later >= begin_s and earlier <= end_s
    ]
    return percentile(gaps_s, 99)


def _prefill_span_s(records: Records) -> tuple[float, float]:
    for record in records.get(LONG, ()):
        if record.token_times_s:
            return record.sent_s, record.token_times_s[0]
    return float("inf"), float("-inf")


def _rate_after_first(records: Records) -> float | None:
    rates = []
    for record in records.get(ALL, ()):
        if record.num_output_tokens > 1:
            taken_s = record.token_times_s[-1] - record.token_times_s[0]
            # All tokens at once: no stream, so the whole wait is what they took.
            rates.append((record.num_output_tokens - 1) / (taken_s or record.e2e_s))
    return statistics.median(rates) if rates else None


def _prefill_rate(records: Records) -> float | None:
    rates = [r.num_prompt_tokens / r.ttft_s for r in records.get(ALL, ()) if r.ttft_s]
    return statistics.median(rates) if rates else None


_MIXED = (
    Figure("short TTFT p50, s", False, _ttft(SHORT, 50)),
    Figure("short TTFT p99, s", False, _ttft(SHORT, 99)),
    Figure("long TTFT p50, s", False, _ttft(LONG, 50)),
    Figure("long TTFT p99, s", False, _ttft(LONG, 99)),
    Figure("ITL p99, ms", False, _itl_ms(SHORT, 99)),
    Figure("worst gap, s", False, _worst_gap_s(SHORT)),
)
_PREFILL = (Figure("prefill tokens/s", True, _prefill_rate),)
FIGURES: Mapping[str, tuple[Figure, ...]] = {
    "W1": (
        Figure("output tokens/s", True, _output_rate),
        Figure("TTFT p50, s", False, _ttft(ALL, 50)),
        Figure("TTFT p99, s", False, _ttft(ALL, 99)),
        Figure("ITL p50, ms", False, _itl_ms(ALL, 50)),
        Figure("ITL p99, ms", False, _itl_ms(ALL, 99)),
        Figure("ITL max, ms", False, _itl_ms(ALL, 100)),
    ),
    "W2": _MIXED,
    "W2cap": (
        Figure("requests/s", True, _request_rate),
        Figure("output tokens/s", True, _output_rate),
        Figure("short TTFT p99, s", False, _ttft(SHORT, 99)),
        Figure("worst gap, s", False, _worst_gap_s(SHORT)),
    ),
    "W2half": _MIXED,
    "W2most": _MIXED,
    "W3": (
        Figure("worst gap, s", False, _worst_gap_s(SHORT)),
        Figure("gap p99 while prefilled, s", False, _gap_p99_while_prefilled_s),
        Figure("long TTFT, s", False, _ttft(LONG, 50)),
    ),
    "W4": (
        Figure("first TTFT, s", False, _ttft(FIRST, 50)),
        Figure("hit TTFT p50, s", False, _ttft(HIT, 50)),
        Figure("output tokens/s", True, _output_rate),
    ),
    "W5": (Figure("tokens/s after the first", True, _rate_after_first),),
    "W6": _PREFILL,
    "W6chunk": _PREFILL,
}
