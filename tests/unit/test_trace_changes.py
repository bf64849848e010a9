"""Traces are fitted to a system in the same way by every command that reads one."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from loadtest import load_arguments, sim_command, trace_tool
from loadtest.block_scale import ScaledTrace
from loadtest.load_sources import read_requests
from loadtest.trace import TraceError, TraceRequest, read_trace, write_trace
from loadtest.trace_changes import TraceChanges, first_requests

TRACE = [TraceRequest(3.0 * (n // 3), 1300, 10, (0, 2 * n + 1, 2 * n + 2)) for n in range(9)]
FLAGS = ["--spread-ticks", "3", "--time-scale", "0.5", "--length-scale", "0.05", "--seed", "7"]


def parsed(module: object, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(words)


def test_every_command_reads_the_same_trace(tmp_path: Path) -> None:
    """A trace shares less, or comes at other times, under load than in the simulator or once it
    has been converted.
    """
    source, output = str(tmp_path / "trace.jsonl"), str(tmp_path / "out.jsonl")
    write_trace(source, TRACE)
    data = ("--dataset-name", "trace", "--dataset-path", source, "--num-prompts", "5")
    loaded = read_requests(load_arguments.workload_of(parsed(load_arguments, *data, *FLAGS)))
    simulated = sim_command.read_requests(
        parsed(sim_command, source, "--cost-model", "x", "--num-prompts", "5", *FLAGS)
    )
    words = ("convert", source, output, "--num-prompts", "5", *FLAGS)
    trace_tool.main(parsed(trace_tool, *words))
    assert loaded == simulated and loaded.hash_block_tokens == 26
    written = read_trace(output)
    assert [each.hash_ids for each in written] == [each.hash_ids for each in loaded.requests]
    # The file holds nanoseconds.
    times_s = [each.timestamp_s for each in loaded.requests]
    assert [each.timestamp_s for each in written] == pytest.approx(times_s, abs=1e-9)


def test_ticks_are_spread_before_times_are_scaled() -> None:
    """A tick of three seconds is spread over three seconds of the scaled time, into the next."""
    changed = TraceChanges(tick_s=3.0, time_scale=0.1).apply(TRACE)
    assert [int(each.timestamp_s / 0.3) for each in changed.requests] == [0] * 3 + [1] * 3 + [2] * 3


def test_nothing_asked_for_changes_nothing() -> None:
    """A default changes a trace."""
    assert TraceChanges().apply(TRACE) == ScaledTrace(TRACE, 512)


def test_more_requests_than_there_are_is_refused() -> None:
    """A load or a simulation is smaller than it was asked to be, unsaid."""
    assert first_requests(TRACE, None) == TRACE and first_requests(TRACE, 2) == TRACE[:2]
    for num_prompts in (-1, 0, 10):
        with pytest.raises(TraceError, match="the trace has 9 requests"):
            first_requests(TRACE, num_prompts)


def test_a_block_of_no_token_is_refused() -> None:
    """A division by zero ends the run."""
    with pytest.raises(TraceError, match="--hash-block-tokens must be at least 1"):
        TraceChanges(hash_block_tokens=0)
