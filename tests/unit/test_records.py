"""One request's latencies, and the bounds it has to keep."""

from __future__ import annotations

import pytest

from loadtest.records import MeasuresError, RequestRecord, Slo


def make_record(
    *token_times_s: float, end_s: float = 3.0, error: str | None = None
) -> RequestRecord:
    return RequestRecord(1.0, 1.25, 8, token_times_s, end_s, error=error)


def test_latencies_count_from_the_intended_send() -> None:
    """A late client makes a slow server look fast."""
    record = make_record(1.5, 2.0, 2.75, end_s=3.0)
    assert record.ttft_s == 0.5
    assert record.e2e_s == 2.0
    assert record.lag_s == 0.25
    assert record.tpot_s == 0.75
    assert record.worst_gap_s == 0.75


def test_one_token_has_no_time_per_token() -> None:
    """A one-token answer is divided by zero, or pulls the mean down with a 0."""
    record = make_record(1.5)
    assert (record.ttft_s, record.tpot_s, record.worst_gap_s) == (0.5, None, None)


def test_no_token_has_no_first() -> None:
    """An answer without tokens ends the run with an IndexError."""
    assert make_record().ttft_s is None


@pytest.mark.parametrize(
    ("bounds", "is_met"),
    [
        ([], True),
        (["ttft:500"], True),
        (["ttft:499"], False),
        (["tpot:750"], True),
        (["tpot:749"], False),
        (["itl:750"], True),
        (["itl:749"], False),
        (["e2el:2000"], True),
        (["e2el:1999"], False),
        (["ttft:500", "itl:1"], False),
    ],
)
def test_each_bound_is_looked_at(bounds: list[str], is_met: bool) -> None:
    """A bound is taken for another, or as one that may not be reached."""
    assert Slo.parse(bounds).is_met(make_record(1.5, 2.0, 2.75)) is is_met


def test_a_failed_request_is_never_good() -> None:
    """A server that fails fast has the best goodput."""
    assert not Slo().is_met(make_record(1.5, error="timeout"))


def test_an_answer_without_tokens_misses_a_bound_on_its_first() -> None:
    """A server that answers nothing meets every TTFT."""
    assert not Slo.parse(["ttft:5000"]).is_met(make_record())
    assert Slo.parse(["tpot:50"]).is_met(make_record(1.5))


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (["tftt:300"], "one of ttft, tpot, itl, e2el"),
        (["ttft"], "a number of milliseconds above 0"),
        (["ttft:fast"], "a number of milliseconds above 0"),
        (["ttft:0"], "a number of milliseconds above 0"),
        (["ttft:nan"], "a number of milliseconds above 0"),
        (["ttft:3", "ttft:4"], "given twice"),
    ],
)
def test_a_bad_bound_is_told(bounds: list[str], says: str) -> None:
    """A misspelt bound is dropped, so that everything is good."""
    with pytest.raises(MeasuresError, match=says):
        Slo.parse(bounds)


def test_bounds_are_told_as_they_are_given() -> None:
    """A result does not say what was asked for."""
    bounds = ["ttft:300", "tpot:50", "itl:62.5", "e2el:8000"]
    assert Slo.parse(bounds).as_text() == bounds
    assert Slo.parse(bounds).has_bounds
    assert not Slo.parse([]).has_bounds
