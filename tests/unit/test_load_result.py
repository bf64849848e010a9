"""What stands beside the figures of a load: how far they are to be believed, and their file."""

from __future__ import annotations

import argparse

import pytest

from loadtest.client import Answer, Ask
from loadtest.load_arguments import add_arguments, settings_of
from loadtest.load_result import RunState, file_name, result_of, table_of
from loadtest.load_run import EndedRequest, PlannedRequest
from loadtest.load_tally import LoadTally
from loadtest.measures import Slo
from loadtest.stream_reader import StreamedAnswer, TokenCount

RAMP = "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 9".split()


def told(*flags: str, lag_s: float = 0.0, is_interrupted: bool = False) -> str:
    """The table of a load of one request that was sent so late, and took a second more."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = settings_of(parser.parse_args(flags))
    tally = LoadTally(Slo())
    answer = StreamedAnswer([lag_s + 1.0], TokenCount.SCALED_EVENTS, None, 0)
    planned = PlannedRequest(Ask("hi", 1), 7, 0.0)
    tally.add(EndedRequest(planned, 0.0, Answer(lag_s, lag_s + 1.0, answer, None)), 0.0)
    state = RunState("20260101-000000", 1, is_interrupted)
    result = result_of(settings, tally.snapshot(2.0), state)
    return table_of(result, settings.result)


def test_a_late_client_says_so() -> None:
    """Figures that are the client's own pass for the server's."""
    late = "the client sent late"
    assert late in told(lag_s=0.5)
    assert late not in told(lag_s=0.05)
    # A bound on concurrency makes requests wait on purpose.
    assert late not in told("--max-concurrency", "1", lag_s=0.5)


def test_estimates_say_so() -> None:
    """Lengths and token times that are guesses pass for counted ones."""
    assert "prompts were plain words" in told()
    assert "prompts were plain words" not in told("--tokenizer", "x")
    assert "an estimate" in told()
    assert "not counted" in told(is_interrupted=True) and "not counted" not in told()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "openai-infqps-m-20260101.json"),
        (["--backend", "openai-chat"], "openai-chat-infqps-m-20260101.json"),
        (["--request-rate", "4"], "openai-4.0qps-m-20260101.json"),
        (RAMP, "openai-ramp-up-linear-1qps-9qps-m-20260101.json"),
        (["--request-rate", "2.5", "--label", "a"], "a-2.5qps-m-20260101.json"),
        (["--max-concurrency", "8"], "openai-infqps-concurrency8-m-20260101.json"),
        (["--result-filename", "mine.json"], "mine.json"),
    ],
)
def test_files_are_named_as_vllm_names_them(flags: list[str], name: str) -> None:
    """Scripts that look for vLLM's files find none."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = settings_of(parser.parse_args([*flags, "--model", "org/m"]))
    assert file_name(settings, "20260101") == name
