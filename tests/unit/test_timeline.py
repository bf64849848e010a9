"""Counts over the time of a run, in bounded memory."""

from __future__ import annotations

import json

from loadtest.measures import Measures
from loadtest.records import RequestRecord, Slo
from loadtest.report_data import MAX_STEPS, PERCENTS, report_section
from loadtest.timeline import FIRST_BIN_S, MAX_BINS, Timeline


def record(start_s: float, num_tokens: int = 3, error: str | None = None) -> RequestRecord:
    times_s = [start_s + 0.1 * (1 + index) for index in range(num_tokens)]
    return RequestRecord(start_s, start_s, 5, times_s, start_s + 0.1 * num_tokens, error=error)


def test_everything_is_counted_once_however_long_the_run() -> None:
    """Counts are lost or doubled where bins are put together; or a run of hours fills memory."""
    timeline = Timeline(start_s=100.0)
    for index in range(3000):
        timeline.add(record(100.0 + index * 5.0, error="timeout" if index % 10 == 0 else None))
    counts = timeline.counts()
    assert len(counts.num_arrived) <= MAX_BINS
    assert sum(counts.num_arrived) == sum(counts.num_ended) == 3000
    assert sum(counts.num_failed) == 300 and sum(counts.num_output_tokens) == 9000
    assert counts.bin_s == FIRST_BIN_S * 128 and counts.num_open[-1] == 0
    # Evenly spread, so every bin but the last holds about as many.
    assert max(counts.num_arrived) - min(counts.num_arrived[:-1]) <= 1


def test_open_requests_are_those_that_came_and_have_not_ended() -> None:
    """The queue over time is off by a bin, or an early record breaks it."""
    timeline = Timeline()
    for start_s, end_s in ((-1.0, 0.6), (0.1, 1.1), (0.6, 0.7)):
        timeline.add(RequestRecord(start_s, start_s, 5, [end_s], end_s))
    counts = timeline.counts()
    assert list(counts.num_arrived) == [2, 0, 1, 0, 0]
    assert list(counts.num_ended) == [0, 0, 2, 0, 1]
    assert counts.num_open == [2, 2, 1, 1, 0]


def test_a_report_is_json_of_bounded_size() -> None:
    """The section for pictures grows with the run, or holds what JSON cannot."""

    class Step:
        time_s, kv_use = 1.0, 0.123456789
        num_decode_tokens = num_prefill_tokens = num_running = num_waiting = 2

    measures, timeline = Measures(Slo()), Timeline()
    for index in range(50):
        measures.add(record(index * 1.0))
        timeline.add(record(index * 1.0))
    section = report_section(measures.summary(50.0), timeline.counts(), [Step()] * 10_000)
    assert json.loads(json.dumps(section, allow_nan=False)) == section
    assert len(section["curves_ms"]["ttft"]) == len(PERCENTS) == len(section["percents"])
    assert len(section["steps"]["kv_use"]) <= MAX_STEPS
    empty = report_section(Measures(Slo()).summary(0.0))
    assert empty["curves_ms"]["ttft"] == [] and "steps" not in empty
