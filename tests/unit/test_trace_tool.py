"""`chunkserve trace`: figures of a trace, and changes that keep what it shares."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from loadtest.arrivals import arriving_at
from loadtest.block_scale import ScaledTrace, scale_with_blocks
from loadtest.converters import TRACES_VARIABLE, load_trace
from loadtest.trace import TraceError, TraceRequest, read_trace, write_trace
from loadtest.trace_stats import describe, description_lines
from loadtest.trace_tool import add_arguments, main

TRACES = Path(os.environ.get(TRACES_VARIABLE) or Path(__file__).parents[2] / "../shared/traces")
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


def test_a_stretch_is_taken_before_times_are_scaled(tmp_path: Path) -> None:
    """The busiest minutes of a trace are looked for in another time than its own."""
    source, output = tmp_path / "t.jsonl", tmp_path / "out.jsonl"
    write_trace(source, [TraceRequest(float(time_s), 5 + time_s, 1) for time_s in range(9)])
    run("convert", str(source), str(output), "--from-s", "4", "--to-s", "7", "--time-scale", "2")
    found = [(each.timestamp_s, each.input_length) for each in read_trace(output)]
    assert found == [(0.0, 9), (2.0, 10), (4.0, 11)]


def test_new_arrivals_may_come_faster_and_faster(tmp_path: Path) -> None:
    """A ramp is asked for and the trace's own times are kept."""
    source, output = tmp_path / "t.jsonl", tmp_path / "out.jsonl"
    write_trace(source, [TraceRequest(0.0, 5, 1)] * 400)
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "50")
    run("convert", str(source), str(output), *ramp)
    times_s = [each.timestamp_s for each in read_trace(output)]
    assert times_s[200] - times_s[0] > 3 * (times_s[399] - times_s[200])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--from-s", "900"), "no request from 900 s"),
        (("--ramp-up-start-rps", "1"), "need --ramp-up-strategy"),
        (("--ramp-up-strategy", "linear"), "a ramp-up goes from"),
        (
            ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--request-rate", "2"),
            "without --request-rate",
        ),
    ],
)
def test_changes_that_make_no_sense_are_refused(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    """A flag is dropped in silence, and a file that looks like a trace is written."""
    source, output = tmp_path / "t.jsonl", tmp_path / "out.jsonl"
    write_trace(source, SHARED)
    with pytest.raises(TraceError, match=says):
        run("convert", str(source), str(output), *words)
    assert not output.exists()


def test_a_trace_is_not_written_over_itself(tmp_path: Path) -> None:
    """The trace is lost to its own conversion."""
    source = tmp_path / "t.jsonl"
    write_trace(source, SHARED)
    with pytest.raises(TraceError, match="is the trace itself"):
        run("convert", str(source), str(source), "--num-prompts", "1")
    assert len(read_trace(source)) == len(SHARED)


def test_a_mix_is_written_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of the mix does nothing."""
    output = tmp_path / "mix.jsonl"
    mix = ("--mix-short", "8", "--mix-long", "99", "--mix-long-share", "0.5", "--mix-output", "3")
    shared = ("--mix-prefixes", "2", "--mix-prefix-share", "0", "--mix-priorities", "1:1")
    words = ("--num-prompts", "200", "--request-rate", "4", *mix, *shared)
    assert run("synthesize", str(output), *words) == 0
    made = read_trace(output)
    assert {each.input_length for each in made} == {8, 99}
    assert {(each.output_length, each.priority) for each in made} == {(3, 1)}
    assert len({each.hash_ids for each in made}) == 200
    assert made[-1].timestamp_s == pytest.approx(50.0)
    assert "200" in capsys.readouterr().out


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no published traces ({TRACES_VARIABLE})")
def test_published_traces_are_what_their_authors_say() -> None:
    """A reader drops rows, shifts times or misses what prompts share."""
    code = describe(ScaledTrace(load_trace(TRACES / "azure_llm_2023_code.csv"), 512))
    assert code["num_requests"] == 8819
    assert (code["input_length"]["p50"], code["output_length"]["p50"]) == (1469.0, 13.0)
    assert code["arrivals"]["duration_s"] == pytest.approx(3435.948, abs=1e-3)
    assert code["arrivals"]["windows"][0]["peak_rate"] == 67.0
    path = TRACES / "mooncake_fast25_conversation_first30min.jsonl"
    conversation = describe(ScaledTrace(load_trace(path), 512))
    assert conversation["num_requests"] == 5719
    hit_rate = conversation["sharing"]["best_token_hit_rate"]
    assert hit_rate == pytest.approx(0.3472, abs=5e-5)


def test_a_trace_of_years_is_described() -> None:
    """Its seconds are written down one by one until memory ends."""
    requests = [TraceRequest(time_s, 5, 5) for time_s in (0.0, 0.2, 1e11)]
    arrivals = describe(ScaledTrace(requests, 512))["arrivals"]
    assert arrivals["windows"][0]["peak_rate"] == 2.0
    assert arrivals["windows"][0]["dispersion"] == pytest.approx(2.0)
