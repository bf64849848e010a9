"""How a prompt is cut: windows, overlap and uniformity (requirements 1.1 to 1.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.chunk_plan import next_chunk_size, num_overlap_tokens, plan_chunks

lengths = st.integers(0, 400)
windows = st.integers(1, 64)
ratios = st.floats(0.0, 0.5)


@given(lengths, windows, ratios)
def test_new_spans_partition_the_prompt(num_tokens: int, window: int, ratio: float) -> None:
    """A token of the prompt is computed twice or never."""
    spans = plan_chunks(num_tokens, window, ratio)
    computed = [position for span in spans for position in range(span.new_start, span.end)]
    assert computed == list(range(num_tokens))
    assert [span.index for span in spans] == list(range(len(spans)))


@given(lengths, windows, ratios)
def test_no_window_is_larger_than_the_chunk_size(
    num_tokens: int, window: int, ratio: float
) -> None:
    """A window shows more than chunk_size tokens, overlap included, or computes none."""
    for span in plan_chunks(num_tokens, window, ratio):
        assert span.end - span.start <= window
        assert span.num_new_tokens >= 1


@given(lengths, windows, ratios)
def test_overlap_is_the_tail_of_what_was_computed(
    num_tokens: int, window: int, ratio: float
) -> None:
    """A later window repeats another number of tokens than overlap_ratio says, or not the last
    ones.
    """
    spans = plan_chunks(num_tokens, window, ratio)
    overlap = num_overlap_tokens(window, ratio)
    for previous, span in zip(spans, spans[1:], strict=False):
        assert span.new_start == previous.end
        assert span.num_overlap_tokens == min(overlap, previous.end)


@given(lengths, windows, ratios)
def test_there_are_no_more_chunks_than_must_be(num_tokens: int, window: int, ratio: float) -> None:
    """Cutting evenly costs an extra chunk."""
    stride = window - num_overlap_tokens(window, ratio)
    least = 0 if num_tokens == 0 else 1 + max(0, -(-(num_tokens - window) // stride))
    assert len(plan_chunks(num_tokens, window, ratio)) == least


@given(lengths, windows)
def test_chunks_are_uniform(num_tokens: int, window: int) -> None:
    """The last chunk of a prompt is a tiny one."""
    sizes = [span.num_new_tokens for span in plan_chunks(num_tokens, window)]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(lengths, windows, ratios)
def test_with_overlap_only_a_full_first_window_is_unlike(
    num_tokens: int, window: int, ratio: float
) -> None:
    """With overlap, chunks after the first differ by more than a token."""
    sizes = [span.num_new_tokens for span in plan_chunks(num_tokens, window, ratio)]
    later = sizes[1:]
    assert not later or max(later) - min(later) <= 1
    assert not later or sizes[0] >= min(later)


@given(st.integers(1, 400), windows, ratios, st.integers(1, 64))
def test_a_chunk_cut_short_by_the_budget_loses_nothing(
    num_tokens: int, window: int, ratio: float, budget: int
) -> None:
    """A step that could take only part of a chunk makes a later one too large or the prompt
    endless.
    """
    done = 0
    while done < num_tokens:
        size = next_chunk_size(num_tokens - done, window, ratio, is_first=done == 0)
        assert 1 <= size <= window
        done += min(size, budget)
    assert done == num_tokens


def test_an_example() -> None:
    """28 tokens in windows of 12 of which a third is context are not 12 + 8 + 8."""
    spans = plan_chunks(28, 12, 0.34)
    assert [(span.start, span.new_start, span.end) for span in spans] == [
        (0, 0, 12),
        (8, 12, 20),
        (16, 20, 28),
    ]


@pytest.mark.parametrize(("window", "ratio"), [(0, 0.0), (-1, 0.0), (8, 1.0), (8, -0.1)])
def test_nonsense_is_refused(window: int, ratio: float) -> None:
    """A window of no tokens, or one that only repeats, is accepted."""
    with pytest.raises(ValueError):
        plan_chunks(10, window, ratio)
