"""Synthetic mixes are what they say."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.synthetic import LengthRange, Mix, parse_priorities, synthesize
from loadtest.trace import TraceError


def test_a_mix_has_the_lengths_and_shares_it_asks_for() -> None:
    """Long requests are as rare or frequent as chance has it, or lengths leave their range."""
    mix = Mix(LengthRange(10, 99), LengthRange(1000, 2000), 0.2, LengthRange(5, 5))
    requests = synthesize(mix, 4000, rate=20.0, seed=3)
    long = [each for each in requests if each.input_length >= 1000]
    short = [each for each in requests if each.input_length < 1000]
    assert len(long) / 4000 == pytest.approx(0.2, abs=0.02)
    assert all(each.input_length <= 2000 for each in long)
    assert all(10 <= each.input_length <= 99 for each in short)
    assert {each.output_length for each in requests} == {5}
    assert not any(each.hash_ids for each in requests)
    assert requests[-1].timestamp_s == pytest.approx(200.0)


def test_lengths_spread_over_magnitudes() -> None:
    """Short prompts are as rare as in a uniform draw, or the ends are never drawn."""
    mix = Mix(LengthRange(1, 1000), long_share=0.0)
    lengths = sorted(each.input_length for each in synthesize(mix, 8000, 10.0))
    assert (lengths[0], lengths[-1]) == (1, 1000)
    assert 25 <= lengths[4000] <= 40


def test_prefixes_are_shared_and_the_rest_is_not() -> None:
    """Requests share more than their prefix, or a prompt ends with it."""
    mix = Mix(num_prefixes=3, prefix_blocks=2, prefix_share=0.5)
    requests = synthesize(mix, 2000, 10.0)
    begins = [each for each in requests if each.hash_ids[0] < 6]
    assert len(begins) / 2000 == pytest.approx(0.5, abs=0.05)
    assert {each.hash_ids[:2] for each in begins} == {(0, 1), (2, 3), (4, 5)}
    assert all(each.input_length >= 1024 + 64 for each in begins)
    assert all(len(each.hash_ids) == -(-each.input_length // 512) for each in requests)
    uses = Counter(hash_id for each in requests for hash_id in each.hash_ids)
    assert {count for hash_id, count in uses.items() if hash_id >= 6} == {1}


def test_priorities_come_by_weight() -> None:
    """Every request has the same priority."""
    mix = Mix(priorities=parse_priorities("0:1,2:3"))
    counts = Counter(each.priority for each in synthesize(mix, 4000, 10.0))
    assert counts[0] / 4000 == pytest.approx(0.25, abs=0.03)
    assert set(counts) == {0, 2}


def test_the_seed_makes_the_trace() -> None:
    """A report cannot be repeated."""
    mix = Mix(num_prefixes=2)
    assert synthesize(mix, 50, 10.0, seed=1) == synthesize(mix, 50, 10.0, seed=1)
    assert synthesize(mix, 50, 10.0, seed=1) != synthesize(mix, 50, 10.0, seed=2)


@pytest.mark.parametrize("text", ["", "0-5", "9-3", "a-b", "5-", "1.5"])
def test_bad_lengths_are_told(text: str) -> None:
    """A range of nothing is drawn from."""
    with pytest.raises(TraceError, match="no lengths"):
        LengthRange.parse(text)


@pytest.mark.parametrize("text", ["", "0", "0:x", "0:0", "0:-1,1:2", "-1:1", "0:nan", "0:1:2"])
def test_bad_priorities_are_told(text: str) -> None:
    """Weights that make no shares are drawn by."""
    with pytest.raises(TraceError, match="priorit"):
        Mix(priorities=parse_priorities(text))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_bad_shares_are_told(share: float) -> None:
    """A share beyond all requests is taken as all."""
    with pytest.raises(TraceError, match="within 0 and 1"):
        Mix(long_share=share)
