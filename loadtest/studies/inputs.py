"""Lengths of requests, as published tables hold them."""

from __future__ import annotations

import csv
from pathlib import Path

Lengths = tuple[int, int]
"""(prompt tokens, output tokens)."""
COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("ContextTokens", "GeneratedTokens"),
)


def read_lengths(path: Path) -> list[Lengths]:
    """The lengths in a table, in its order."""
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        prompt, output = next(c for c in COLUMNS if c[0] in (table.fieldnames or ()))
        return [(int(float(row[prompt])), max(1, int(float(row[output])))) for row in table]
