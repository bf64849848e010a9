"""The trace format: what is read, and what a bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.trace import TraceError, TraceRequest, read_trace, write_trace

GOOD = '{"timestamp": 3000, "input_length": 700, "output_length": 52, "hash_ids": [0, 14]}'


def trace_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_line_of_mooncake_is_read(tmp_path: Path) -> None:
    """Milliseconds are taken for seconds, or a field for another."""
    assert read_trace(trace_of(tmp_path, GOOD)) == [TraceRequest(3.0, 700, 52, (0, 14))]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """A field is lost or a time shifts on the way through a file."""
    requests = [
        TraceRequest(0.0, 1, 1),
        TraceRequest(0.1234567, 1025, 9, (5, 6, 7), 2),
        TraceRequest(3601.0000001, 12, 3),
    ]
    path = tmp_path / "out.jsonl"
    write_trace(path, requests)
    assert read_trace(path) == requests


def test_requests_come_by_time(tmp_path: Path) -> None:
    """A reader that trusts the order sends late requests at once; equal times change places."""
    rows = [(5, 1), (2, 2), (5, 3), (2, 4)]
    lines = [f'{{"timestamp": {t}, "input_length": {n}, "output_length": 1}}' for t, n in rows]
    assert [r.input_length for r in read_trace(trace_of(tmp_path, *lines))] == [2, 4, 1, 3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (GOOD.replace("output_length", "ouput_length"), "ouput_length is unknown"),
        (GOOD.replace("output_length", "ouput_length"), "output_length is missing"),
        (GOOD.replace("3000", '"3000"'), "timestamp must be a number of milliseconds"),
        (GOOD.replace("3000", "-1"), "0 to 1e+15 milliseconds"),
        (GOOD.replace("3000", "true"), "timestamp must be a number"),
        (GOOD.replace("700", "0"), "input_length must be a whole number of 1 to 10,000,000"),
        (GOOD.replace("700", "7.5"), "input_length must be a whole number"),
        (GOOD.replace("52", "null"), "output_length must be a whole number"),
        (GOOD.replace("700", "1000000000000"), "input_length must be a whole number of 1 to"),
        (GOOD.replace("3000", "1e300"), "milliseconds, not 1e"),
        (GOOD.replace("[0, 14]", "[0, -1]"), "hash_ids must be whole numbers of 0 or more"),
        (GOOD.replace("[0, 14]", "7"), "hash_ids must be a list"),
        (GOOD.replace("[0, 14]", '[], "priority": -1'), "priority must be a whole number"),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, line: str, says: str) -> None:
    """A bad line is taken, ends in a traceback, or leaves the reader to search for it."""
    path = trace_of(tmp_path, GOOD, "", line)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    """A load of nothing is run and divided by."""
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(trace_of(tmp_path, "", ""))
