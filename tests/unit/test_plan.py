"""Planning a fleet from the command line, with small traces of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import plan_pool
from loadtest.report import read_runs
from loadtest.trace import TraceRequest, write_trace
from serve_app.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two classes: chats, and as many documents."""
    path = tmp_path / "trace.jsonl"
    requests = []
    for index in range(40):
        requests.append(TraceRequest(index * 0.05, 300, 60, priority=0))
        requests.append(TraceRequest(index * 0.05 + 0.02, 6000, 30, priority=1))
    write_trace(path, requests)
    return path


def plan(trace: Path, output: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    arguments = ["plan", "--trace", str(trace), "--cost-model", "h100-llama3-8b",
                 "--save-result", str(output), "--budgets", "1024", *more]  # fmt: skip
    status = main(arguments)
    return status, json.loads(output.read_text())["pools"]


def test_each_class_gets_the_fewest_gpus_that_serve_it(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan names more GPUs than are needed, or fewer; or classes are planned as one."""
    path = tmp_path / "plan.json"
    status, pools = plan(trace, path, "--slo", "ttft:400", "itl:100", "--max-replicas", "8",
                         "--max-num-seqs", "64", "--price", "2.5")  # fmt: skip
    assert status == 0
    assert [pool["label"] for pool in pools] == ["priority 0", "priority 1"]
    few, many = (pool["num_replicas"] for pool in pools)
    assert few < many <= 8
    for pool in pools:
        assert pool["is_served"] and pool["p99_ttft_ms"] <= 400 and pool["completed"] == 40
        assert pool["cost_per_hour"] == 2.5 * pool["num_replicas"]
        # One fewer was tried with the best setting, and was not enough.
        trials = {(t["max_num_batched_tokens"], t["chunk_size"], t["num_replicas"]): t["meets_slo"]
                  for t in pool["trials"]}  # fmt: skip
        best = (pool["max_num_batched_tokens"], pool["chunk_size"])
        assert trials[(*best, pool["num_replicas"])]
        assert pool["num_replicas"] == 1 or not trials[(*best, pool["num_replicas"] - 1)]
    assert "priority 1" in capsys.readouterr().out
    assert [run.label for run in read_runs([path])] == ["priority 0", "priority 1"]


def test_a_load_that_no_fleet_serves_is_said_so(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that cannot hold is printed as if it did."""
    status, pools = plan(trace, tmp_path / "plan.json", "--slo", "ttft:1", "--max-replicas", "2")
    assert status == 1 and not any(pool["is_served"] for pool in pools)
    assert "NOT served" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, says",
    [
        (["--slo", "tft:300"], "tft"),
        (["--cost-model", "b300"], "b300"),
        (["--budgets", "many"], "--budgets"),
        (["--budgets", "128"], "above --max-num-seqs"),
        (["--seconds", "-1"], ""),
    ],
)
def test_bad_input_ends_in_one_line(
    trace: Path, tmp_path: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled argument ends in a traceback, or plans something else."""
    arguments = ["plan", "--trace", str(trace), *more]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert main(["plan", "--trace", str(tmp_path / "gone.csv")]) == 2


def test_a_long_trace_is_searched_on_its_busiest_stretch_and_confirmed_on_the_whole(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's figures are those of a part, or the quiet part decides."""
    monkeypatch.setattr(plan_pool, "MAX_SEARCHED", 10)
    status, pools = plan(trace, tmp_path / "plan.json", "--slo", "ttft:400", "--max-replicas", "8",
                         "--max-num-seqs", "64")  # fmt: skip
    assert status == 0
    assert [pool["completed"] for pool in pools] == [40, 40]
    requests = [TraceRequest(at, 10, 2) for at in (0.0, 5.0, 9.0, 9.1, 9.3, 12.0)]
    busiest = plan_pool.find_busiest_stretch(requests, 3)
    assert [traced.timestamp_s for traced in busiest] == [9.0, 9.1, 9.3]
    assert plan_pool.find_busiest_stretch(requests, 9) == requests
