"""One request of a trace: when it comes, how long it is, which blocks its prompt is made of."""

from __future__ import annotations

from dataclasses import dataclass

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request; `hash_ids` name the blocks of its prompt, equal ids equal content."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    priority: int = 0
