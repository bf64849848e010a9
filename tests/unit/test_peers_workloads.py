"""The workloads are what the page says they are, and the same each time."""

from __future__ import annotations

import pytest

from loadtest.peers.figures import FIGURES, figures_of
from loadtest.peers.workloads import (
    FIRST,
    HIT,
    LONG,
    SHORT,
    WORKLOADS,
    Sizes,
    Workload,
    build_workload,
)
from tests.unit.peers_tools import make_record


def numbers_of(workload: Workload) -> list[int]:
    return [request.number for phase in workload.phases for request in phase.requests]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    """Two services of one round are asked different requests."""
    assert build_workload(name, Sizes(0.5), 1) == build_workload(name, Sizes(0.5), 1)


def test_no_two_rounds_or_workloads_share_a_prompt() -> None:
    """A later turn finds its prompts in the prefix cache of an earlier one."""
    seen = [
        number
        for round_number in range(3)
        for name in WORKLOADS
        for number in numbers_of(build_workload(name, Sizes(), round_number))
    ]
    assert len(set(seen)) == len(seen)
    shared = [
        build_workload("W4", Sizes(), round_number).phases[0].requests[0].lengths.hash_ids
        for round_number in range(3)
    ]
    assert len({each for ids in shared for each in ids}) == 6


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 64), (0.5, 32), (0.1, 16)])
def test_scale_changes_numbers_and_not_how_many_are_in_flight(scale: float, expected: int) -> None:
    """A small scale measures another load, not a shorter one."""
    (phase,) = build_workload("W1", Sizes(scale), 0).phases
    assert len(phase.requests) == expected
    assert phase.max_concurrency == 16
    assert {r.lengths.output_length for r in phase.requests} == {128}


def test_one_of_eight_mixed_requests_is_long() -> None:
    """The mixed load is all short, or its long ones come in a row."""
    (phase,) = build_workload("W2", Sizes(), 0).phases
    labels = [request.label for request in phase.requests]
    assert len(labels) == 60
    assert labels.count(LONG) == 7
    assert LONG not in labels[:4]
    assert {r.lengths.input_length for r in phase.requests if r.label == SHORT} == {64}


def test_the_rate_of_the_mix_is_that_of_the_sizes() -> None:
    """A service is loaded at another rate than the table says."""
    (phase,) = build_workload("W2", Sizes(rate=2.0), 0).phases
    times_s = [request.due_s for request in phase.requests]
    assert times_s[-1] == pytest.approx(30.0)
    (capacity,) = build_workload("W2cap", Sizes(rate=2.0), 0).phases
    assert {request.due_s for request in capacity.requests} == {None}
    assert capacity.max_concurrency == 24


def test_hits_come_after_the_first_has_ended_and_share_its_prefix() -> None:
    """A hit is sent before there is anything to hit."""
    first, hits = build_workload("W4", Sizes(), 0).phases
    assert [r.label for r in first.requests] == [FIRST]
    assert [r.label for r in hits.requests] == [HIT] * 15
    assert {r.lengths.hash_ids for r in hits.requests} == {first.requests[0].lengths.hash_ids}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sizes(scale=0.0),
        lambda: Sizes(rate=float("nan")),
        lambda: build_workload("W9", Sizes(), 0),
    ],
)
def test_what_cannot_be_played_is_refused(make: object) -> None:
    """A misspelled workload or a scale of nothing plays nothing and says so nowhere."""
    assert callable(make)
    with pytest.raises(ValueError, match="scale|rate|choose of W1"):
        make()


# --- figures --------------------------------------------------------------------------------------


def test_every_workload_has_figures() -> None:
    """A workload is played for nothing."""
    assert set(FIGURES) == set(WORKLOADS)


def test_rates_and_gaps_of_a_decode_load() -> None:
    """Tokens per second leave out the wait for the first, or gaps are counted over requests."""
    records = {"all": [make_record(0.0, [1.0, 1.1, 1.2]), make_record(0.5, [2.0, 2.5])]}
    figures = figures_of("W1", records)
    assert figures["output tokens/s"] == pytest.approx(5 / 2.5)
    assert figures["TTFT p50, s"] == pytest.approx(1.0)
    assert figures["ITL max, ms"] == pytest.approx(500.0)
    assert figures["ITL p50, ms"] == pytest.approx(100.0)


def test_a_single_stream_counts_what_follows_its_first_token() -> None:
    """The prefill is part of the decode rate."""
    figures = figures_of("W5", {"all": [make_record(0.0, [10.0, 10.5, 11.0])]})
    assert figures == {"tokens/s after the first": pytest.approx(2.0)}


def test_an_answer_that_comes_at_once_has_no_endless_rate() -> None:
    """A server that does not stream wins every decode workload."""
    records = [make_record(0.0, [4.0, 4.0, 4.0, 4.0])]
    assert figures_of("W5", {"all": records})["tokens/s after the first"] == pytest.approx(0.75)
    assert figures_of("W3", {SHORT: records})["worst gap, s"] == pytest.approx(4.0)
    assert "ITL p50, ms" not in figures_of("W1", {"all": records})


def test_the_stall_counts_gaps_of_the_decodes_while_the_long_prompt_waits() -> None:
    """The long request's own gaps are stalls, or the gaps before it came are."""
    records = {
        SHORT: [make_record(0.0, [1.0, 3.0, 5.0, 8.0, 12.0])],
        LONG: [make_record(3.5, [7.0, 20.0], 4096)],
    }
    figures = figures_of("W3", records)
    assert figures["worst gap, s"] == pytest.approx(4.0)
    assert figures["gap p99 while prefilled, s"] == pytest.approx(3.0)
    assert figures["long TTFT, s"] == pytest.approx(3.5)


def test_a_prefill_is_prompt_over_time_to_first_token() -> None:
    """Prefill counts the answer's tokens too."""
    figures = figures_of("W6", {"all": [make_record(1.0, [5.0], 4096)]})
    assert figures == {"prefill tokens/s": pytest.approx(1024.0)}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_turn_without_a_completed_request_has_no_figures(workload: str) -> None:
    """A service that fails all requests breaks the benchmark of the others."""
    assert figures_of(workload, {}) == {}
