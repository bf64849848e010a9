"""A load has the lengths, prompts and times it was asked for, and can be repeated."""

from __future__ import annotations

import pytest

from loadtest.load_prompts import WordPrompts
from loadtest.load_workload import (
    RandomLengths,
    WorkloadError,
    own_times,
    plan_requests,
)
from loadtest.trace import TraceRequest

TRACE = [TraceRequest(5.0, 100, 10, priority=1), TraceRequest(7.0, 3, 1)]


def test_random_lengths_stay_in_their_range_and_repeat() -> None:
    """Lengths lie outside of what was asked, or change from reading to reading."""
    lengths = RandomLengths(200, input_len=100, output_len=10, range_ratio=0.5, seed=2)
    first = list(lengths)
    assert first == list(lengths) and len(first) == len(lengths) == 200
    assert {request.input_length for request in first} <= set(range(50, 151))
    assert {request.output_length for request in first} == set(range(5, 16))
    assert list(RandomLengths(1, 7, 8))[0] == TraceRequest(0.0, 7, 8)


def test_a_shared_prefix_comes_before_random_lengths() -> None:
    """What all prompts share is taken from their length, or is not the same block of each."""
    assert list(RandomLengths(2, 7, 8, prefix_len=5)) == [TraceRequest(0.0, 12, 8, (0,))] * 2


def test_a_plan_holds_what_the_trace_says() -> None:
    """Priority, lengths or times of a trace get lost on the way to the client."""
    planned = list(plan_requests(TRACE, WordPrompts(0), own_times(TRACE)))
    assert [request.due_s for request in planned] == [0.0, 2.0]
    assert [request.num_prompt_tokens for request in planned] == [100, 3]
    assert [(p.ask.max_tokens, p.ask.priority) for p in planned] == [(10, 1), (1, 0)]


def test_what_makes_no_workload_is_refused() -> None:
    """A load of nothing is run, or ends in a traceback."""
    for bad in ((0, 1, 1, 0, 0.0), (1, 0, 1, 0, 0.0), (1, 1, 1, 0, 1.0), (1, 1, 1, -1, 0.0)):
        with pytest.raises(WorkloadError):
            RandomLengths(*bad)
