"""Traces of other formats: what they become, and what a file of none is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.converters import find_trace, load_trace, open_trace
from loadtest.trace import TraceError, TraceRequest, write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def file_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_azure_times_become_seconds_from_the_first(tmp_path: Path) -> None:
    """Seven digits of a second are refused or cut, or times of day are sent as they are."""
    path = file_of(
        tmp_path,
        AZURE,
        "2023-11-16 23:59:59.9000001,374,44",
        "2023-11-17 00:00:01.4000001,396,109",
        "2023-11-17 00:00:02,7,8",
    )
    loaded = open_trace(path)
    assert (loaded.format, loaded.has_arrivals) == ("azure", True)
    assert [request.input_length for request in loaded.requests] == [374, 396, 7]
    assert [request.output_length for request in loaded.requests] == [44, 109, 8]
    times_s = [request.timestamp_s for request in loaded.requests]
    assert times_s == pytest.approx([0.0, 1.5, 2.0999999], abs=1e-6)


@pytest.mark.parametrize(
    "later",
    [
        "2024-05-10 00:00:01.500000+00:00",
        "2024-05-10T00:00:01.5Z",
        "2024-05-10 02:00:01.5000000+02:00",
        "2024-05-10 00:00:01.5",
    ],
)
def test_azure_times_may_have_a_zone(tmp_path: Path, later: str) -> None:
    """The files of 2024, which name a zone, are refused or shifted."""
    path = file_of(tmp_path, AZURE, "2024-05-10 00:00:00.0+00:00,1,2", f"{later},3,4")
    assert load_trace(path)[1] == TraceRequest(pytest.approx(1.5, abs=1e-6), 3, 4)


def test_burstgpt_leaves_failures_out(tmp_path: Path) -> None:
    """Failed requests, which have no answer, are sent, or vanish uncounted."""
    path = file_of(
        tmp_path,
        BURSTGPT,
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,API log",
        "118,GPT-4,417,276,693,Conversation log",
    )
    loaded = open_trace(path)
    assert loaded.requests == [TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276)]
    assert (loaded.format, loaded.num_left_out) == ("burstgpt", 1)


def test_a_length_file_has_no_arrivals(tmp_path: Path) -> None:
    """Requests without times pass for a burst of all at once."""
    path = file_of(tmp_path, "num_prefill_tokens,num_decode_tokens,pd_ratio", "74,918,0.08")
    loaded = open_trace(path)
    assert loaded.requests == [TraceRequest(0.0, 74, 918)]
    assert not loaded.has_arrivals


def test_lengths_may_come_with_arrivals(tmp_path: Path) -> None:
    """Relative arrival times are dropped, or rows that are out of order stay so."""
    path = file_of(
        tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens", "2.5,3,4", "0.5,1.0,2"
    )
    assert load_trace(path) == [TraceRequest(0.0, 1, 2), TraceRequest(2.0, 3, 4)]


def test_our_own_format_is_told_by_its_content(tmp_path: Path) -> None:
    """A trace that this command wrote is refused for its ending."""
    path = tmp_path / "trace.txt"
    write_trace(path, [TraceRequest(1.0, 5, 6, (7,))])
    assert open_trace(path).format == "mooncake"
    assert load_trace(path) == [TraceRequest(1.0, 5, 6, (7,))]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([""], "the file is empty"),
        (["a,b", "1,2"], "no known columns (a, b); known are azure: TIMESTAMP"),
        ([AZURE], "the trace is empty"),
        ([AZURE + ",Region", "2024-05-10 00:00:00,1,2,west"], "unknown column Region"),
        ([AZURE, "yesterday,1,2"], ":2: TIMESTAMP 'yesterday' is no time"),
        ([AZURE, "2024-05-10 00:00:00,1,2", "2024-05-10 00:00:00,one,2"], ":3: ContextTokens"),
        ([AZURE, "2024-05-10 00:00:00,1.5,2"], "whole number of tokens"),
        ([AZURE, "2024-05-10 00:00:00,-1,2"], "whole number of tokens"),
        ([AZURE, "2024-05-10 00:00:00,1"], "GeneratedTokens must be a whole number"),
        ([AZURE, "2024-05-10 00:00:00,1,2,3"], "more values than columns"),
        ([BURSTGPT, "nan,GPT-4,1,2,3,API log"], "Timestamp must be a number of seconds"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, lines: list[str], says: str) -> None:
    """A file is misread, ends in a traceback, or leaves the reader to guess what is wanted."""
    with pytest.raises(TraceError) as raised:
        load_trace(file_of(tmp_path, *lines))
    assert says in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_trace_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command has to be given the whole path."""
    path = file_of(tmp_path, AZURE, "2024-05-10 00:00:00,1,2")
    monkeypatch.setenv("CHUNKSERVE_TRACES", str(tmp_path))
    assert find_trace("trace") == find_trace("trace.csv") == find_trace(path) == path
    with pytest.raises(TraceError, match="set CHUNKSERVE_TRACES"):
        find_trace("other")


def test_the_header_of_a_picture_is_told_in_short(tmp_path: Path) -> None:
    """A binary file ends in a screen of its bytes, over many lines."""
    path = tmp_path / "x.csv"
    path.write_bytes(bytes(range(14, 256)) * 20)
    with pytest.raises(TraceError, match="no known columns") as refused:
        open_trace(path)
    told = str(refused.value).replace(str(path), "")
    assert told.isprintable() and len(told) < 400
