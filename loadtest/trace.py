"""One request of a trace, and the file format traces are kept in: Mooncake's JSON lines.

Owns reading and writing that one format. Other formats become it in `converters`, what the prompts
say is made in `prompts`.

    {"timestamp": 3000, "input_length": 700, "output_length": 52, "hash_ids": [0, 14]}
                  ms                                                         |   |
                                    tokens [0, 512) of the prompt ----------'   '- tokens [512, 700)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

HASH_BLOCK_TOKENS = 512
"""Tokens that a hash id stands for (Mooncake, FAST'25, section 4)."""

MAX_TOKENS = 10_000_000
"""Of a prompt or an answer: more than any model takes, and less than memory holds."""
MAX_PRIORITY = 1_000_000
MAX_TIME_MS = 1e15
"""Some thirty thousand years."""

REQUIRED_COLUMNS = ("timestamp", "input_length", "output_length")
OPTIONAL_COLUMNS = ("hash_ids", "priority")


class TraceError(ValueError):
    """A trace that cannot be used; one line that names the place and says what to change."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        timestamp_s: seconds from the start of the trace.
        input_length: tokens of the prompt, at least 1.
        output_length: tokens of the answer, at least 1.
        hash_ids: name the blocks of the prompt in order; equal ids stand for equal content.
            Empty: the prompt shares nothing.
        priority: 0 is the most urgent.
    """

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    priority: int = 0


def read_trace(path: str | Path) -> list[TraceRequest]:
    """The requests of a file of JSON lines, by time; those of equal time stay in file order.

    Raises:
        TraceError: the file is empty, or a line is not a request.
        OSError: it cannot be read.
    """
    requests = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                requests.append(_request_of(line))
            except ValueError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: the trace is empty; give one with at least one request")
    requests.sort(key=lambda request: request.timestamp_s)
    return requests


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests as JSON lines that `read_trace` reads back as they were.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "wb") as file:
        for request in requests:
            file.write(orjson.dumps(_row_of(request)) + b"\n")


def _row_of(request: TraceRequest) -> dict[str, Any]:
    # Nanoseconds are finer than any clock of a trace, and end the noise of binary fractions.
    timestamp_ms = round(request.timestamp_s * 1e3, 6)
    row: dict[str, Any] = {
        "timestamp": int(timestamp_ms) if timestamp_ms.is_integer() else timestamp_ms,
        "input_length": request.input_length,
        "output_length": request.output_length,
    }
    if request.hash_ids:
        row["hash_ids"] = request.hash_ids
    if request.priority:
        row["priority"] = request.priority
    return row


def _request_of(line: bytes) -> TraceRequest:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"not JSON ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise TraceError("not a JSON object; write one object a line")
    _check_columns(row)
    return TraceRequest(
        timestamp_s=_time_ms(row["timestamp"]) / 1e3,
        input_length=_whole(row, "input_length", 1, MAX_TOKENS),
        output_length=_whole(row, "output_length", 1, MAX_TOKENS),
        hash_ids=_hash_ids(row.get("hash_ids", [])),
        priority=_whole(row, "priority", 0, MAX_PRIORITY) if "priority" in row else 0,
    )


def _check_columns(row: Mapping[str, Any]) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in row]
    unknown = [name for name in row if name not in REQUIRED_COLUMNS + OPTIONAL_COLUMNS]
    if not missing and not unknown:
        return
    faults = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
    required, optional = ", ".join(REQUIRED_COLUMNS), ", ".join(OPTIONAL_COLUMNS)
    raise TraceError(f"{'; '.join(faults)}: a request has {required} and may have {optional}")


def _time_ms(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TraceError(f"timestamp must be a number of milliseconds, not {value!r}")
    if not 0 <= value <= MAX_TIME_MS:
        raise TraceError(f"timestamp must be 0 to {MAX_TIME_MS:g} milliseconds, not {value!r}")
    return float(value)


def _whole(row: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TraceError(f"{name} must be a whole number of {least} to {most:,}, not {value!r}")
    return value


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TraceError(f"hash_ids must be a list of whole numbers, not {value!r}")
    for hash_id in value:
        if isinstance(hash_id, bool) or not isinstance(hash_id, int) or hash_id < 0:
            raise TraceError(f"hash_ids must be whole numbers of 0 or more, not {hash_id!r}")
    return tuple(value)
