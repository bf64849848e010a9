"""One request of a trace: when it comes, how long it is, which blocks its prompt is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request; `hash_ids` name the blocks of its prompt, equal ids equal content."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    priority: int = 0


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a Mooncake trace."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        TraceRequest(
            row["timestamp"] / 1e3,
            row["input_length"],
            row["output_length"],
            tuple(row.get("hash_ids", ())),
            row.get("priority", 0),
        )
        for row in rows
    ]
