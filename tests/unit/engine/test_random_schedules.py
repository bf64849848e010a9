"""Any schedule keeps the invariants and gives the oracle's tokens (public faults B17, B37, B40,
B44, B49, B52).

What is checked in each step stands in `schedule_checks`; `test_mutants` proves that it can fail.
"""

from __future__ import annotations

import pytest
from doubles import make_limits
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_net import Fate, ScheduleNet, Setup, run_fates
from schedule_random import run_schedules

from deployments.config import SchedulerConfig
from deployments.protocol import GenerateRequest, SamplingParams

NUM_STEPS = 100_000
NUM_SEEDS = 20


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_schedules_keep_every_invariant(seed: int) -> None:
    """Some schedule breaks an invariant of the architecture page, or changes a request's tokens."""
    nets = run_schedules(seed, NUM_STEPS // NUM_SEEDS)
    assert sum(net.num_steps for net in nets) >= NUM_STEPS // NUM_SEEDS
    # The net is worth nothing where nothing gets tight.
    assert sum(net.num_preemptions for net in nets) > 100
    assert sum(net.num_finished for net in nets) > 500


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """A small pool under a configuration that is often at its limits."""
    chunk_size = draw(st.integers(1, 9))
    max_num_seqs = draw(st.integers(1, 5))
    config = SchedulerConfig(
        chunk_size=chunk_size,
        overlap_ratio=draw(st.sampled_from([0.0, 0.2, 0.5])),
        batch_timeout_ms=draw(st.sampled_from([0.0, 5.0, 1000.0])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(1, chunk_size + 4)),
        max_num_passes=draw(st.integers(0, 3)),
    )
    limits = make_limits(
        num_blocks=draw(st.integers(3, 12)),
        block_size=draw(st.integers(1, 4)),
        max_model_len=draw(st.sampled_from([1000, 16])),
    )
    return Setup(limits, config, enable_prefix_caching=draw(st.booleans()))


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    """A prompt of one token again and again, but for one place: all share prefixes, and blocks that
    are equal stand behind others that are not. Its id is given later."""
    prompt = [1] * draw(st.integers(0, 14))
    place = draw(st.integers(0, 20))
    if place < len(prompt):
        prompt[place] = 2
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 8)), temperature=draw(st.sampled_from([0.0, 1.0]))
    )
    return GenerateRequest(
        request_id="",
        prompt_token_ids=tuple(prompt),
        sampling_params=params,
        priority=draw(st.integers(0, 2)),
        chunk_size=draw(st.none() | st.integers(1, 4)),
        cache_salt=draw(st.sampled_from(["", "", "b"])),
    )


fates = st.builds(Fate, st.sampled_from([0.0, 0.01]), st.booleans(), st.none() | st.integers(0, 4))
events = st.one_of(
    requests(),
    requests(),
    fates,
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "abort in step"]), st.integers(0, 5)),
)
# Hypothesis likes lists short, and in a short history nothing gets tight.
histories = st.lists(events, min_size=12, max_size=60)


def play(net: ScheduleNet, number: int, event: object) -> None:
    """Let one thing happen to a net."""
    if isinstance(event, GenerateRequest):
        named = GenerateRequest(
            f"r{number}",
            event.prompt_token_ids,
            event.sampling_params,
            event.priority,
            event.chunk_size,
            cache_salt=event.cache_salt,
        )
        net.add(named)
    elif isinstance(event, Fate):
        if net.live:
            net.step(event)
    else:
        kind, index = event
        if kind == "abort":
            net.abort(index)
        elif kind == "steps":
            run_fates(net, [Fate(0.002)] * index)
        elif net.live:
            net.step(Fate(meanwhile=(lambda: net.abort(index),)))


@settings(max_examples=150, deadline=None)
@given(setups(), histories)
def test_any_sequence_of_events_keeps_every_invariant(setup: Setup, history: list[object]) -> None:
    """Some short sequence of arrivals, aborts, failures and steps breaks an invariant."""
    net = ScheduleNet(setup)
    for number, event in enumerate(history):
        play(net, number, event)
    net.drain()
