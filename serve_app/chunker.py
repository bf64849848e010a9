"""How this service cuts a prompt into chunks, and the answer of POST /chunk.

Adapts the engine's chunk plan to text; the arithmetic is the engine's own. What is shown is what
runs for a prompt alone on an idle engine: cached prefixes and a step's budget make other cuts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import Protocol

from pydantic import BaseModel

from deployments.config import SchedulerConfig
from deployments.engine.block_hash import root_hash
from deployments.engine.chunk_plan import ChunkSpan, plan_chunks
from serve_app.tokenization import EncodedText


class TokenSpan(BaseModel):
    """Tokens [start, end) of a prompt."""

    start: int
    end: int


class TextChunk(BaseModel):
    """A window of a prompt: its text and its tokens [start, end), the first `num_overlap_tokens`
    read from the cache.
    """

    index: int
    text: str
    start: int
    end: int
    num_overlap_tokens: int
    overlap: TokenSpan
    """Tokens that an earlier chunk computed."""
    new: TokenSpan
    """Tokens this chunk computes; those of all chunks partition the prompt."""
    hash: str
    """SHA-256 in hex of the whole prompt up to `end`, under no salt: equal hashes mean equal
    prefixes, however they are cut."""


class ChunkResponse(BaseModel):
    """The answer of POST /chunk."""

    num_tokens: int
    chunk_size: int
    overlap_ratio: float
    chunks: list[TextChunk]


class ChunkSizes(Protocol):
    """Which chunk size a request asks the engine for."""

    def observe(self, num_tokens: int) -> None:
        """Note the length of a prompt that is served."""
        ...

    def propose(self) -> int | None:
        """The largest chunk in tokens; None: the engine's own."""
        ...


class EngineChunkSize:
    """Leaves the chunk size to the engine."""

    def observe(self, num_tokens: int) -> None:
        """See ChunkSizes."""

    def propose(self) -> int | None:
        """See ChunkSizes."""
        return None


class AdaptiveChunker:
    """Small chunks while prompts are short, large ones while they are long, by their median.

    Args:
        max_chunk_size: never proposed beyond it.
        window: so many prompts are remembered.
    """

    SHORT_PROMPT = 1024
    """A median of so many tokens or fewer is short."""
    SHORT_SIZE = 256
    LONG_SIZE = 512

    def __init__(self, max_chunk_size: int, window: int = 512) -> None:
        self._max_chunk_size = max_chunk_size
        self._lengths: deque[int] = deque(maxlen=window)
        self._proposal: int | None = None

    def observe(self, num_tokens: int) -> None:
        """See ChunkSizes."""
        self._lengths.append(num_tokens)
        is_short = median_low(self._lengths) <= self.SHORT_PROMPT
        self._proposal = min(self.SHORT_SIZE if is_short else self.LONG_SIZE, self._max_chunk_size)

    def propose(self) -> int | None:
        """See ChunkSizes; the engine's own until a prompt was seen."""
        return self._proposal


def chunk_sizes(config: SchedulerConfig, is_adaptive: bool) -> ChunkSizes:
    """The rule a service uses."""
    return AdaptiveChunker(config.chunk_size) if is_adaptive else EngineChunkSize()


class Chunker:
    """Cuts prompts by the scheduler's own rule.

    Args:
        config: holds chunk_size and overlap_ratio.
        sizes: what requests ask for below them.
    """

    def __init__(self, config: SchedulerConfig, sizes: ChunkSizes | None = None) -> None:
        self._config = config
        self._sizes = sizes or EngineChunkSize()

    def size_for(self, num_tokens: int) -> int | None:
        """The chunk size that a request with such a prompt asks for; the prompt is noted."""
        self._sizes.observe(num_tokens)
        return self._sizes.propose()

    def describe(
        self,
        text: str,
        encoded: EncodedText,
        chunk_size: int | None = None,
        overlap_ratio: float | None = None,
    ) -> ChunkResponse:
        """How a prompt is cut now; the last two override the service's own.

        Windows without overlap concatenate to the prompt: a character whose bytes lie in two
        windows belongs to the earlier one, whole.

        Raises:
            ValueError: `chunk_size` < 1 or `overlap_ratio` outside [0, 1).
        """
        default = self._sizes.propose() or self._config.chunk_size
        size = default if chunk_size is None else chunk_size
        ratio = self._config.overlap_ratio if overlap_ratio is None else overlap_ratio
        num_tokens = len(encoded.token_ids)
        spans = plan_chunks(num_tokens, size, ratio)
        return ChunkResponse(
            num_tokens=num_tokens,
            chunk_size=size,
            overlap_ratio=ratio,
            chunks=_text_chunks(text, encoded, spans),
        )


def _text_chunks(text: str, encoded: EncodedText, spans: Sequence[ChunkSpan]) -> list[TextChunk]:
    cuts = encoded.character_cuts(len(text))
    return [
        TextChunk(
            index=span.index,
            text=text[cuts[span.start] : cuts[span.end]],
            start=span.start,
            end=span.end,
            num_overlap_tokens=span.num_overlap_tokens,
            overlap=TokenSpan(start=span.start, end=span.new_start),
            new=TokenSpan(start=span.new_start, end=span.end),
            hash=prefix_hash,
        )
        for span, prefix_hash in zip(spans, _prefix_hashes(encoded.token_ids, spans), strict=True)
    ]


def _prefix_hashes(token_ids: Sequence[int], spans: Sequence[ChunkSpan]) -> list[str]:
    """For each span `hash_block` of the prompt up to its end, as one block; each token is hashed
    once.
    """
    running = hashlib.sha256(root_hash(""))
    hashes: list[str] = []
    for span in spans:
        running.update(array("q", token_ids[span.new_start : span.end]).tobytes())
        hashes.append(running.copy().hexdigest())
    return hashes
