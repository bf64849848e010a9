"""How a prompt is cut into chunks: window sizes, overlap as context, no tiny last chunk.

Owns the arithmetic alone; the scheduler asks for the next chunk, `/chunk` shows the whole plan.

Overlap is context, not recomputation: a window's first tokens repeat the tail of the window before
it and are read from the KV cache, so a later window computes `max_chunk_size * (1 - overlap_ratio)`
new tokens.

    tokens    0                    12        20        28
    window 0  [====================)
    window 1                [~~~~~~|=========)            ~ overlap: in the KV cache already
    window 2                          [~~~~~~|========)   = new: computed by this chunk
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One chunk of a prompt, in token positions, ends exclusive: computes [new_start, end), shows
    [start, end).
    """

    index: int
    start: int
    new_start: int
    end: int

    @property
    def num_overlap_tokens(self) -> int:
        """Tokens of the window that an earlier chunk computed."""
        return self.new_start - self.start

    @property
    def num_new_tokens(self) -> int:
        """Tokens this chunk computes."""
        return self.end - self.new_start


def num_overlap_tokens(max_chunk_size: int, overlap_ratio: float) -> int:
    """How many tokens of a full window repeat the one before it; always leaves at least one new
    token.
    """
    return min(int(max_chunk_size * overlap_ratio), max_chunk_size - 1)


def next_chunk_size(
    num_tokens: int, max_chunk_size: int, overlap_ratio: float, is_first: bool
) -> int:
    """How many new tokens the next chunk computes of `num_tokens` left, so that all chunks to come
    are alike.

    `is_first`: nothing precedes this chunk, so its whole window is new. Otherwise the overlap takes
    its share.
    Stateless: what is left decides, so a step that could take only part of a chunk just asks again.
    """
    stride = max_chunk_size - num_overlap_tokens(max_chunk_size, overlap_ratio)
    largest = max_chunk_size if is_first else stride
    if num_tokens <= largest:
        return num_tokens
    num_chunks = 1 + -(-(num_tokens - largest) // stride)
    even = -(-num_tokens // num_chunks)
    # Only a first chunk may exceed the stride; it takes what the later ones cannot.
    return even if even <= stride else num_tokens - (num_chunks - 1) * stride


def plan_chunks(
    num_tokens: int, max_chunk_size: int, overlap_ratio: float = 0.0
) -> list[ChunkSpan]:
    """Cut a prompt of `num_tokens` into as few windows of at most `max_chunk_size` tokens as will
    do.

    The new spans partition [0, num_tokens) in order. They differ by at most one token, unless only
    a full first window saves a chunk. An empty prompt has no chunks.

    Raises:
        ValueError: `max_chunk_size` < 1 or `overlap_ratio` outside [0, 1).
    """
    if max_chunk_size < 1:
        raise ValueError(f"max_chunk_size must be at least 1, got {max_chunk_size}")
    if not 0.0 <= overlap_ratio < 1.0:
        raise ValueError(f"overlap_ratio must be at least 0 and less than 1, got {overlap_ratio}")
    overlap = num_overlap_tokens(max_chunk_size, overlap_ratio)
    spans: list[ChunkSpan] = []
    done = 0
    while done < num_tokens:
        size = next_chunk_size(num_tokens - done, max_chunk_size, overlap_ratio, is_first=done == 0)
        spans.append(ChunkSpan(len(spans), max(0, done - overlap), done, done + size))
        done += size
    return spans
