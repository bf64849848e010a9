"""Traces of other formats become `TraceRequest`s: Azure and BurstGPT CSVs, plain lists of lengths.

The columns tell the format, so that a file of another is refused rather than misread. Owns no
times of its own: what has none stands at 0 until `arrivals` gives it some.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from loadtest.trace import MAX_TOKENS, TraceError, TraceRequest, read_trace

TRACES_VARIABLE = "CHUNKSERVE_TRACES"
DEFAULT_TRACES = Path("../shared/traces")
MOONCAKE = "mooncake"
MAX_TOLD = 80
"""Letters of a header that an error repeats."""

_Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """What a file holds.

    Args:
        requests: by time; the first is at 0 where the format has times of day.
        format: its name.
        has_arrivals: whether the times are the file's; without, all are 0.
        num_left_out: rows of requests that had no answer or no prompt.
    """

    requests: list[TraceRequest]
    format: str
    has_arrivals: bool
    num_left_out: int


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """How the rows of one kind of CSV read.

    Args:
        name: as it is told.
        required: columns that tell the format, prompt and answer tokens the last two.
        optional: columns that may be there.
        time_s: seconds of a row, on any clock; None: there are no times.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    time_s: Callable[[_Row], float] | None


def _azure_time_s(row: _Row) -> float:
    """Of a time of day with up to nine digits of a second, with or without a zone."""
    text = row["TIMESTAMP"].strip()
    seconds, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    # fromisoformat of Python 3.10 knows neither seven digits nor a Z.
    zone = (rest[len(digits) :] if dot else "").replace("Z", "+00:00")
    try:
        moment = datetime.fromisoformat(seconds.replace("Z", "+00:00") + zone)
    except ValueError as error:
        raise TraceError(
            f"TIMESTAMP {text!r} is no time; write it as 2023-11-16 18:15:46.6805900"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(f"0.{digits or 0}")


def _number_of(column: str) -> Callable[[_Row], float]:
    def time_s(row: _Row) -> float:
        try:
            value = float(row[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise TraceError(f"{column} must be a number of seconds, not {row[column]!r}")
        return value

    return time_s


_LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
_LENGTHS_OPTIONAL = ("num_total_tokens", "pd_ratio")
CSV_FORMATS = (
    CsvFormat("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), (), _azure_time_s),
    CsvFormat(
        "burstgpt",
        ("Timestamp", "Request tokens", "Response tokens"),
        ("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
        _number_of("Timestamp"),
    ),
    CsvFormat(
        "lengths with arrivals",
        ("arrived_at", *_LENGTHS),
        _LENGTHS_OPTIONAL,
        _number_of("arrived_at"),
    ),
    CsvFormat("lengths", _LENGTHS, _LENGTHS_OPTIONAL, None),
)


def find_trace(name: str | Path) -> Path:
    """The file of a name: a path, or a file of the folder that `CHUNKSERVE_TRACES` names
    (by default `../shared/traces`), with or without its ending.

    Raises:
        TraceError: there is none.
    """
    folder = Path(os.environ.get(TRACES_VARIABLE) or DEFAULT_TRACES)
    for path in (Path(name), folder / name, folder / f"{name}.csv", folder / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise TraceError(
        f"no trace {name}, here or in {folder}: give a path, or set {TRACES_VARIABLE} to the folder"
    )


def load_trace(name: str | Path) -> list[TraceRequest]:
    """The requests of a file of any known format, found as `find_trace` does.

    Raises:
        TraceError: there is no such file, or it is none that is known.
        OSError: it cannot be read.
    """
    return open_trace(name).requests


def open_trace(name: str | Path) -> LoadedTrace:
    """The same, with what the file is.

    Raises:
        TraceError: there is no such file, or it is none that is known.
        OSError: it cannot be read.
    """
    path = find_trace(name)
    with open(path, "rb") as file:
        is_json = file.read(1) == b"{"
    if is_json or path.suffix == ".jsonl":
        return LoadedTrace(read_trace(path), MOONCAKE, has_arrivals=True, num_left_out=0)
    return _read_csv(path)


def _read_csv(path: Path) -> LoadedTrace:
    requests: list[TraceRequest] = []
    num_left_out = 0
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file, restkey="", restval="")
        form = _format_of(path, tuple(reader.fieldnames or ()))
        for row in reader:
            try:
                request = _request_of(row, form)
            except ValueError as error:
                raise TraceError(f"{path}:{reader.line_num}: {error}") from error
            if request is None:
                num_left_out += 1
            else:
                requests.append(request)
    if not requests:
        raise TraceError(f"{path}: the trace is empty; give one with at least one request")
    requests.sort(key=lambda request: request.timestamp_s)
    # Times of day become seconds from the first request.
    start_s = requests[0].timestamp_s
    requests = [replace(each, timestamp_s=each.timestamp_s - start_s) for each in requests]
    return LoadedTrace(requests, form.name, form.time_s is not None, num_left_out)


def _format_of(path: Path, columns: tuple[str, ...]) -> CsvFormat:
    found = {column.strip() for column in columns}
    for form in CSV_FORMATS:
        if not found >= set(form.required):
            continue
        unknown = sorted(found - set(form.required) - set(form.optional))
        if unknown:
            known = ", ".join((*form.required, *form.optional))
            raise TraceError(
                f"{path}: unknown column {', '.join(unknown)} in a file of {form.name}: "
                f"known are {known}"
            )
        return form
    forms = "; ".join(f"{form.name}: {', '.join(form.required)}" for form in CSV_FORMATS)
    raise TraceError(
        f"{path}: no known columns ({_told(columns) or 'the file is empty'}); known are {forms}"
    )


def _told(columns: tuple[str, ...]) -> str:
    """What stands in a header, though it be that of a picture."""
    text = ", ".join(columns)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}…"


def _request_of(row: dict[str, str], form: CsvFormat) -> TraceRequest | None:
    """The request of a row; None for one that had no prompt or no answer (in BurstGPT, a failed
    one).
    """
    if row.get(""):
        raise TraceError("more values than columns; write one value a column")
    row = {column.strip(): value for column, value in row.items()}
    prompt, answer = form.required[-2:]
    input_length, output_length = _tokens(row, prompt), _tokens(row, answer)
    timestamp_s = 0.0 if form.time_s is None else form.time_s(row)
    if not input_length or not output_length:
        return None
    return TraceRequest(timestamp_s, input_length, output_length)


def _tokens(row: _Row, column: str) -> int:
    text = row[column].strip()
    try:
        # Some tools write 12.0 for 12.
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TOKENS or not value.is_integer():
        raise TraceError(
            f"{column} must be a whole number of tokens, at most {MAX_TOKENS:,}, not {text!r}"
        )
    return int(value)
