"""`chunkserve trace`: figures of a trace, and changes that keep what it shares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from loadtest.arrivals import arriving_at, scale_lengths
from loadtest.block_scale import ScaledTrace, scale_with_blocks
from loadtest.trace import TraceError, TraceRequest, read_trace, write_trace
from loadtest.trace_stats import describe, description_lines
from loadtest.trace_tool import add_arguments, main

# Two conversations of 1,300 tokens over one system prompt of 512, each asked twice.
SHARED = [TraceRequest(n, 1300, 10, (0, 2 * (n % 2) + 1, 2 * (n % 2) + 2)) for n in range(4)]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(words))


def best_hit_rate(trace: ScaledTrace) -> float:
    return float(describe(trace)["sharing"]["best_token_hit_rate"])


@pytest.mark.parametrize("factor", [0.03, 0.05, 0.3, 1.0, 2.5])
def test_a_scaled_trace_shares_the_same_part_of_its_prompts(factor: float) -> None:
    """A trace that is shortened for a small machine shares less than the one it stands for."""
    scaled = scale_with_blocks(SHARED, factor)
    assert best_hit_rate(scaled) == pytest.approx((512 + 2 * 1300) / (4 * 1300), abs=0.02)
    for request in scaled.requests:
        assert len(request.hash_ids) == -(-request.input_length // scaled.hash_block_tokens)
        assert request.input_length == pytest.approx(1300 * factor, abs=2)


def test_blocks_that_do_not_scale_share_less() -> None:
    """The reason for scaling them is gone: the simpler function would do."""
    fixed = ScaledTrace(scale_lengths(SHARED, 0.05), 512)
    assert best_hit_rate(fixed) < best_hit_rate(scale_with_blocks(SHARED, 0.05)) - 0.05


def test_lengths_without_ids_scale_to_the_nearest_token() -> None:
    """Requests that share nothing are rounded to blocks, or lose their last token."""
    scaled = scale_with_blocks([TraceRequest(0.0, 1000, 3)], 0.1)
    assert scaled.requests == [TraceRequest(0.0, 100, 1)]
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="above 0"):
            scale_with_blocks(SHARED, factor)


def test_a_block_is_a_hit_only_behind_hits() -> None:
    """A block counts as cached although what stands before it is not."""
    requests = [
        TraceRequest(0.0, 1024, 1, (1, 2)),
        TraceRequest(1.0, 600, 1, (1, 2)),
        TraceRequest(2.0, 1024, 1, (9, 2)),
    ]
    assert best_hit_rate(ScaledTrace(requests, 512)) == pytest.approx(600 / 2648)


@pytest.mark.parametrize(("burstiness", "tolerance"), [(1.0, 0.1), (0.25, 0.15)])
def test_burstiness_is_told_as_it_was_asked_for(burstiness: float, tolerance: float) -> None:
    """A burst looks like Poisson, or Poisson like a metronome."""
    requests = arriving_at([TraceRequest(0.0, 1, 1)] * 5000, 10.0, burstiness)
    arrivals = describe(ScaledTrace(requests, 512))["arrivals"]
    assert arrivals["burstiness"] == pytest.approx(burstiness, rel=tolerance)
    assert arrivals["mean_rate"] == pytest.approx(10.0, rel=0.02)
    if burstiness == 1.0:
        assert arrivals["windows"][0]["dispersion"] == pytest.approx(1.0, rel=0.2)


def test_requests_at_one_time_have_no_rate() -> None:
    """A file of lengths shows an endless rate, or ends in a division by zero."""
    figures = describe(ScaledTrace([TraceRequest(0.0, 5, 1)] * 3, 512))
    assert figures["arrivals"] is None and figures["sharing"] is None
    assert description_lines(figures)[-1].endswith("all at once")


def test_what_is_converted_is_what_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that is written is another than the one that is shown."""
    table, output = tmp_path / "lengths.csv", tmp_path / "out.jsonl"
    table.write_text("num_prefill_tokens,num_decode_tokens\n" + "40,4\n50,5\n" * 20)
    assert run("convert", str(table), str(output), "--request-rate", "2") == 0
    capsys.readouterr()
    assert run("describe", str(output), "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_requests"] == len(read_trace(output)) == 40
    assert figures["input_length"]["mean"] == 45.0


def test_what_a_trace_cannot_say_is_said_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scaled blocks are read as blocks of 512, and lengths as a burst, because nobody was told."""
    trace, table = tmp_path / "t.jsonl", tmp_path / "lengths.csv"
    write_trace(trace, SHARED)
    table.write_text("num_prefill_tokens,num_decode_tokens\n40,4\n40,0\n")
    run("convert", str(trace), str(tmp_path / "out.jsonl"), "--length-scale", "0.05")
    assert "stands for 26 tokens" in capsys.readouterr().err
    run("describe", str(table))
    told = capsys.readouterr().err
    assert "1 rows without" in told and "--request-rate" in told


@pytest.mark.parametrize("words", [("--num-prompts", "0"), ("--num-prompts", "9")])
def test_more_requests_than_there_are_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A slice is shorter than it was asked to be, unsaid."""
    write_trace(tmp_path / "t.jsonl", SHARED)
    with pytest.raises(TraceError, match="the trace has 4 requests"):
        run("describe", str(tmp_path / "t.jsonl"), *words)
