"""Many requests together: rates, pooled gaps, goodput, errors, and the JSON they end in."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from loadtest.measures import DEFINITIONS, Measures, MeasuresError, RequestRecord, Slo, result_json

VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "errors",
    *(f"{kind}_ttft_ms" for kind in ("mean", "median", "std", "p99")),
    *(f"{kind}_tpot_ms" for kind in ("mean", "median", "std", "p99")),
    *(f"{kind}_itl_ms" for kind in ("mean", "median", "std", "p99")),
    *(f"{kind}_e2el_ms" for kind in ("mean", "median", "std", "p99")),
}


def make_record(
    *token_times_s: float, end_s: float = 3.0, error: str | None = None, priority: int = 0
) -> RequestRecord:
    return RequestRecord(1.0, 1.25, 8, token_times_s, end_s, 3, error, priority)


def measures_of(records: Iterable[RequestRecord], *bounds: str) -> Measures:
    measures = Measures(Slo.parse(bounds))
    for record in records:
        measures.add(record)
    return measures


def test_gaps_of_all_requests_are_pooled() -> None:
    """ITL is averaged per request first, so that long answers count no more than short ones."""
    records = [make_record(1.5, 1.75, 2.0, 2.25), make_record(1.5, 2.5)]
    itl = measures_of(records).summary(1.0).distributions["itl"]
    assert (itl.count, itl.mean, itl.greatest) == (4, 0.4375, 1.0)


def test_rates_and_totals_are_of_completed_requests() -> None:
    """Failed requests add tokens or throughput."""
    records = [make_record(1.5, 2.0), make_record(1.5), make_record(1.5, error="timeout")]
    result = result_json(measures_of(records, "ttft:500", "e2el:1").summary(4.0))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_cached_tokens"]) == (16, 6)
    assert result["total_output_tokens"] == 3
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 0.75
    assert result["total_token_throughput"] == 4.75
    assert result["errors"] == {"timeout": 1}


def test_goodput_counts_requests_that_met_every_bound() -> None:
    """Goodput is throughput, or is told where no bound was given."""
    records = [make_record(1.5, end_s=2.0), make_record(1.5, end_s=9.0)]
    bounded = measures_of(records, "ttft:500", "e2el:1000").summary(4.0)
    assert result_json(bounded)["request_goodput"] == 0.25
    assert result_json(measures_of(records).summary(4.0))["request_goodput"] is None


def test_keys_are_those_of_vllm_bench_serve() -> None:
    """Scripts that read vLLM's results do not find a key here."""
    result = result_json(measures_of([make_record(1.5, 2.0)]).summary(4.0))
    assert set(result) >= VLLM_KEYS
    assert result["mean_ttft_ms"] == 500.0
    json.dumps(result)


def test_what_was_not_measured_is_null() -> None:
    """A run in which every request failed has the best latencies."""
    result = result_json(measures_of([make_record(error="HTTP 500")]).summary(4.0))
    assert result["p99_ttft_ms"] is None
    assert result["mean_lag_ms"] == 250.0
    assert result_json(Measures(Slo()).summary(0.0))["request_throughput"] == 0.0


def test_wanted_percentiles_have_vllms_names() -> None:
    """p99.9 is written as p99, or a metric that was not wanted is there."""
    summary = measures_of([make_record(1.5, 2.0)]).summary(4.0)
    result = result_json(summary, ["ttft"], [25, 99.9])
    assert result["p25_ttft_ms"] == result["p99.9_ttft_ms"] == 500.0
    assert not any(key.endswith("itl_ms") or key.startswith("p99_") for key in result)
    with pytest.raises(MeasuresError, match="no metric 'tftt'"):
        result_json(summary, ["tftt"])
    with pytest.raises(MeasuresError, match="no percentile 101"):
        result_json(summary, ["ttft"], [101])


def test_priorities_are_told_apart_where_there_are_several() -> None:
    """Urgent requests hide among the others."""
    records = [make_record(1.5), make_record(2.0, priority=2), make_record(2.0, priority=2)]
    result = result_json(measures_of(records).summary(4.0))
    assert result["completed"] == 3
    assert {name: part["completed"] for name, part in result["by_priority"].items()} == {
        "0": 1,
        "2": 2,
    }
    assert result["by_priority"]["2"]["mean_ttft_ms"] == 1000.0
    assert "by_priority" not in result_json(measures_of(records[1:]).summary(4.0))


def test_a_summary_stays_as_it_was() -> None:
    """What is saved half way changes as the run goes on."""
    measures = measures_of([make_record(1.5)])
    summary = measures.summary(1.0)
    measures.add(make_record(2.0))
    assert summary.distributions["ttft"].count == summary.num_completed == 1


def test_every_metric_is_defined() -> None:
    """A figure is printed that nobody can tell the meaning of."""
    for name in ("TTFT", "TPOT", "ITL", "E2EL", "worst gap", "lag", "goodput"):
        assert f"\n{name}" in f"\n{DEFINITIONS}"
