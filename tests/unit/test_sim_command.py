"""`chunkserve simulate` from arguments to table, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.trace import TraceRequest, write_trace
from serve_app.cli import main

NUM_REQUESTS = 40


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of forty requests a second."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(index / 40, 300, 8) for index in range(NUM_REQUESTS)])
    return path


def run(*arguments: object) -> int:
    return main(["simulate", *map(str, arguments)])


def test_a_run_is_told_and_saved(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved result lacks what a report is made of, or the console what a person looks for."""
    out = tmp_path / "result.json"
    arguments = ("--cost-model", "h100-llama3-8b", "--replicas", 2, "--slo", "ttft:300")
    assert run(trace, *arguments, "--save-result", out) == 0
    told = capsys.readouterr()
    assert "2 x H100" in told.out and "ttft" in told.out and told.err == ""
    saved = json.loads(out.read_text())
    assert saved["completed"] == NUM_REQUESTS and saved["p99_ttft_ms"] < 300
    assert saved["request_goodput"] == pytest.approx(saved["request_throughput"])
    assert saved["num_replicas"] == 2 and saved["date"]
    steps = saved["report"]["steps"]
    assert len({len(column) for column in steps.values()}) == 1
    assert sum(steps["num_prefill_tokens"]) == 300 * NUM_REQUESTS


def test_a_saturated_run_warns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody plans a fleet by figures that mean nothing."""
    slow = ("--cost-model", "rtx4090-llama3-8b", "--time-scale", 0.01, "--max-num-seqs", 2)
    assert run(trace, *slow) == 0
    assert "saturated" in capsys.readouterr().err


def test_settings_reach_the_replicas(trace: Path, tmp_path: Path) -> None:
    """A setting is parsed and not used, or overrules the config file where it was not given."""
    config = tmp_path / "service.yaml"
    config.write_text("chunk_size: 64\nmax_num_seqs: 7\noverlap_ratio: 0\n")
    out = tmp_path / "result.json"
    given = ("--config", config, "--max-num-seqs", 9, "--num-blocks", 500, "--save-result", out)
    assert run(trace, "--cost-model", "a100-llama3-8b", "--num-prompts", 4, *given) == 0
    saved = json.loads(out.read_text())
    assert saved["completed"] == 4
    assert saved["scheduler"]["chunk_size"] == 64 and saved["scheduler"]["max_num_seqs"] == 9
    assert saved["cache"]["num_blocks"] == 500
    assert max(saved["report"]["steps"]["num_prefill_tokens"]) <= 64 + 9


def test_a_fleet_description_is_simulated_and_options_overrule_it(
    trace: Path, tmp_path: Path
) -> None:
    """`configs/sim.yaml` is out of date, or a part of it is read and not used."""
    out = tmp_path / "result.json"
    given = ("--replicas", 3, "--block-size", 32, "--num-prompts", 4, "--save-result", out)
    assert run(trace, "--config", "configs/sim.yaml", *given) == 0
    saved = json.loads(out.read_text())
    assert saved["cost_model"] == "h100-llama3-8b" and saved["num_replicas"] == 3
    assert saved["scheduler"]["max_num_batched_tokens"] == 1280
    assert saved["cache"]["block_size"] == 32
    assert saved["slo"] == ["ttft:300", "itl:50"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cost_model: h100-llama3-8b\nreplica: 2\n", "did you mean 'replicas'?"),
        ("cost_model: h100-llama3-8b\nscheduler: {chunk_size: 0}\n", "scheduler.chunk_size"),
        ("cost_model: abacus\n", "no cost model abacus"),
        ("chunk_size: 64\n", "no cost model: give --cost-model"),
        ("cost_model: h100-llama3-8b\npolicy: magic\n", "no policy magic"),
    ],
)
def test_a_bad_fleet_description_ends_in_one_line(
    trace: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled key is passed over, or ends in a traceback."""
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert run(trace, "--config", path) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_lengths_get_the_arrivals_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of lengths is served all at once, as if that were its load."""
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "200,5\n" * 30)
    assert run(path, "--cost-model", "a100-llama3-8b") == 2
    assert "give --request-rate" in capsys.readouterr().err
    assert run(path, "--cost-model", "a100-llama3-8b", "--request-rate", 5) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cost-model", "abacus"), "no cost model abacus"),
        (("--cost-model", "a100-llama3-8b", "--chunk-size", 0), "chunk_size"),
        (("--cost-model", "a100-llama3-8b", "--slo", "soon"), "soon"),
        (("--cost-model", "a100-llama3-8b", "--max-num-batched-tokens", 5), "max_num_seqs"),
    ],
)
def test_bad_arguments_end_in_one_line(
    trace: Path,
    arguments: tuple[object, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A typing error ends in a traceback, or in a run of something else."""
    assert run(trace, *arguments) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_calibrate_writes_a_model_that_simulate_takes(trace: Path, tmp_path: Path) -> None:
    """The two commands do not fit together."""
    log, model = tmp_path / "steps.jsonl", tmp_path / "mine.json"
    steps = []
    for index in range(60):
        prefills = [[64 + index, 10 * index]] if index % 2 else []
        record = {"num_decodes": index, "decode_context_tokens": 90 * index, "prefills": prefills}
        steps.append(json.dumps({**record, "step_s": 0.01 + 0.001 * index}))
    log.write_text("\n".join(steps))
    assert main(["calibrate", str(log), "--out", str(model), "--num-kv-tokens", "40000"]) == 0
    assert run(trace, "--cost-model", model) == 0
