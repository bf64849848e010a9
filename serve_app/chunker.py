"""How this service cuts a prompt into chunks, and the answer of POST /chunk.

Adapts the engine's chunk plan to text; the arithmetic is the engine's own. What is shown is what
runs for a prompt alone on an idle engine: cached prefixes and a step's budget make other cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from deployments.config import SchedulerConfig
from deployments.engine.chunk_plan import ChunkSpan, plan_chunks
from serve_app.tokenization import EncodedText


class TextChunk(BaseModel):
    """A window of a prompt: its text and its tokens [start, end), the first `num_overlap_tokens`
    read from the cache.
    """

    index: int
    text: str
    start: int
    end: int
    num_overlap_tokens: int


class ChunkResponse(BaseModel):
    """The answer of POST /chunk."""

    num_tokens: int
    chunks: list[TextChunk]


class Chunker:
    """Cuts prompts by the scheduler's own rule.

    Args:
        config: holds chunk_size and overlap_ratio.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._chunk_size = config.chunk_size
        self._overlap_ratio = config.overlap_ratio

    def plan(
        self, num_tokens: int, chunk_size: int | None = None, overlap_ratio: float | None = None
    ) -> list[ChunkSpan]:
        """The windows of a prompt of `num_tokens`; the two others default to the configuration.

        Raises:
            ValueError: `chunk_size` < 1 or `overlap_ratio` outside [0, 1).
        """
        return plan_chunks(
            num_tokens,
            self._chunk_size if chunk_size is None else chunk_size,
            self._overlap_ratio if overlap_ratio is None else overlap_ratio,
        )


def describe_chunks(text: str, encoded: EncodedText, spans: Sequence[ChunkSpan]) -> ChunkResponse:
    """The windows with their text, taken from the prompt's own characters.

    Windows without overlap concatenate to the prompt: a character whose bytes lie in two windows
    belongs to the earlier one, whole.
    """
    cuts = _character_cuts(text, encoded)
    chunks = [
        TextChunk(
            index=span.index,
            text=text[cuts[span.start] : cuts[span.end]],
            start=span.start,
            end=span.end,
            num_overlap_tokens=span.num_overlap_tokens,
        )
        for span in spans
    ]
    return ChunkResponse(num_tokens=len(encoded.token_ids), chunks=chunks)


def _character_cuts(text: str, encoded: EncodedText) -> list[int]:
    """For each token the character at which the text before it ends; one more for the end of the
    text.

    Where offsets leave characters out (a space trimmed from its token), they go to the token after
    the gap.
    """
    cuts = [0]
    for _, end in encoded.offsets:
        cuts.append(max(cuts[-1], end))
    cuts[-1] = len(text)
    return cuts
