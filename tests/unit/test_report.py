"""Reports: a page that needs nothing else, with every picture its results have data for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.charts import _with_idle, draw_all
from loadtest.measures import Measures, result_json
from loadtest.records import RequestRecord, Slo
from loadtest.report import ReportError, read_runs, render, write_report
from loadtest.report_data import Run, report_section
from loadtest.timeline import Timeline

SLO = Slo.parse(["ttft:300", "itl:50"])


class Step:
    """A made-up step."""

    num_decode_tokens, num_prefill_tokens, num_waiting = 8, 120, 1
    num_running = 9

    def __init__(self, time_s: float) -> None:
        self.time_s = time_s
        self.kv_use = min(1.0, time_s / 60)


def result_of(pace_s: float, label: str, with_steps: bool = False) -> dict[str, Any]:
    chance = random.Random(label)
    measures, timeline = Measures(SLO), Timeline()
    for index in range(200):
        start_s = index * 0.3
        first_s = start_s + chance.expovariate(1 / 0.2)
        times_s = [first_s + pace_s * step * chance.uniform(0.9, 1.1) for step in range(1)]
        for _ in range(19):
            times_s.append(times_s[-1] + pace_s * chance.uniform(0.7, 1.5))
        record = RequestRecord(start_s, start_s, 100, times_s, times_s[-1])
        measures.add(record)
        timeline.add(record)
    summary = measures.summary(62.0)
    steps = [Step(number * 0.05) for number in range(1240)] if with_steps else []
    sweep = [
        {"request_rate": rate, "p99_ttft_ms": 100.0 * rate**2, "p99_itl_ms": None}
        for rate in (1.0, 2.0, 4.0)
    ]
    return {
        **result_json(summary),
        "label": label,
        "command": "chunkserve bench load <x>",
        "sweep": sweep,
        "report": report_section(summary, timeline.counts(), steps),
    }


def saved(folder: Path, **results: dict[str, Any]) -> list[Path]:
    paths = []
    for name, result in results.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(result))
    return paths


def test_a_report_holds_everything_it_shows(tmp_path: Path) -> None:
    """The page needs a file beside it or the network; a picture of the data is missing; the client
    is told nothing of where figures come from.
    """
    paths = saved(
        tmp_path, a=result_of(0.02, "chunked", with_steps=True), b=result_of(0.05, "whole <b>")
    )
    files = write_report(read_runs(paths), tmp_path / "out" / "page.html", "A & B")
    page = files[0].read_text()
    names = {path.stem for path in files[1:]}
    assert names == {
        "cdf_ttft", "cdf_itl", "cdf_e2el", "time_throughput", "time_open", "time_waiting",
        "time_kv", "steps_0", "rate_ttft",
    }  # fmt: skip
    assert page.count("data:image/png;base64,") == len(names)
    assert "http" not in page.split("<h2>")[0] and "<script" not in page
    assert "whole &lt;b&gt;" in page and "<b>" not in page and "A &amp; B" in page
    assert "chunkserve bench load &lt;x&gt;" in page and "TTFT P99" in page
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[1:])


def test_a_saturated_run_is_called_so() -> None:
    """Latencies of a queue that only grew are shown as those of a system that keeps up."""
    run = Run("fast", result_of(0.02, "fast"))
    full = Run("full", result_of(0.02, "full") | {"is_saturated": True})
    assert "full is saturated" in render([run, full], [], "x")
    assert "saturated" not in render([run], [], "x")


def test_equal_results_give_equal_pictures() -> None:
    """A picture changes from day to day, so that nobody sees what did change."""
    result = result_of(0.02, "a")
    result["report"] = {"timeline": result["report"]["timeline"]}
    runs = [Run("a", result)]
    charts = draw_all(runs)
    assert len(charts) == 3 and charts == draw_all(runs)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"completed"', "\x00"])
def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    """Another JSON file ends in a traceback, or in an empty page."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"x\.json") as refused:
        read_runs([path])
    assert "\n" not in str(refused.value)
    with pytest.raises(ReportError, match="gone"):
        read_runs([tmp_path / "gone.json"])


@pytest.mark.parametrize(
    "damaged",
    [
        {"report": 3},
        {"report": {"curves_ms": {"ttft": [1, 2]}}},
        {"report": {"curves_ms": 1, "percents": []}},
        {"report": {"timeline": {"num_open": [1]}}},
        {"report": {"steps": {"time_s": [1, 2]}}},
        {"slo": ["soon"]},
        {"slo": 5},
        {"sweep": 1},
        {"trials": [1]},
        {"pools": 3},
        {"pools": [3]},
    ],
)
def test_a_damaged_result_is_refused_in_one_line(tmp_path: Path, damaged: dict[str, Any]) -> None:
    """A file that someone edited ends in a traceback while its pictures are drawn."""
    (path,) = saved(tmp_path, x=result_of(0.02, "x") | damaged)
    with pytest.raises(ReportError, match=r"x: its|x\.json: is no") as refused:
        read_runs([path])
    assert "\n" not in str(refused.value)


def test_a_search_for_the_capacity_is_drawn_at_its_own_percentile(tmp_path: Path) -> None:
    """Latencies of the P99 are drawn beside an SLO that the P90 has to keep, or not at all."""
    rows = [
        {"request_rate": rate, "p90_ttft_ms": 90.0 * rate, "p99_ttft_ms": None} for rate in (1, 2)
    ]
    search = {
        "label": "s",
        "capacity": 1.0,
        "slo": ["ttft:100"],
        "slo_percentile": 90.0,
        "sweep": rows,
    }
    runs = read_runs(saved(tmp_path, s=search))
    assert [chart.name for chart in draw_all(runs)] == ["rate_ttft"]
    assert "highest rate sustained" in render(runs, [], "x")


def trial_of(budget: int, num_replicas: int, ttft_ms: float | None) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": budget,
        "chunk_size": budget,
        "num_replicas": num_replicas,
        "meets_slo": ttft_ms is not None and ttft_ms <= 300,
        "p99_ttft_ms": ttft_ms,
        "p99_itl_ms": None,
    }


def test_a_plan_shows_the_tries_that_failed_too() -> None:
    """A fleet that was too small, whose try ended before it had latencies, is not to be seen: who
    looks at the picture cannot know that one GPU fewer was tried.
    """
    trials = [trial_of(2048, 3, 280.0), trial_of(2048, 4, 210.0)]
    failed = [trial_of(2048, 2, None), trial_of(512, 3, None), trial_of(512, 4, 310.0)]
    plan = {"completed": 1, "slo": ["ttft:300"], "trials": trials}
    pictures = [draw_all([Run("all requests", plan | {"trials": each})]) for each in
                (trials, trials + failed[:1], trials + failed)]  # fmt: skip
    assert [[chart.name for chart in charts] for charts in pictures] == [["replicas_ttft_0"]] * 3
    assert len({charts[0].png for charts in pictures}) == 3
    assert draw_all([Run("all requests", plan | {"trials": failed[:2]})]) == []


def test_a_rate_that_was_not_sustained_is_drawn_as_such() -> None:
    """The fastest rate of a search looks like one that the server can do."""
    rows = [{"request_rate": rate, "is_sustained": True, "p99_ttft_ms": 90.0} for rate in (1, 2)]
    pictures = [
        draw_all([Run("s", {"sweep": [rows[0], rows[1] | {"is_sustained": is_sustained}]})])
        for is_sustained in (True, False)
    ]
    assert pictures[0][0].png != pictures[1][0].png


def test_the_table_says_which_slo_it_is() -> None:
    """Requests within the SLO are told, and nobody knows of which."""
    runs = [Run("a", {"completed": 1, "slo": ["ttft:300", "itl:50"]}), Run("b", {"completed": 1})]
    assert "<td>SLO, ms</td><td>ttft:300 itl:50</td><td>–</td>" in render(runs, [], "x")
    assert "SLO, ms" not in render(runs[1:], [], "x")


@pytest.mark.parametrize("num_steps", [50, 5000])
def test_a_pause_between_steps_is_drawn_as_one(num_steps: int) -> None:
    """A line climbs for ten idle seconds to the step that ends them."""
    busy = [number * 5.0 / num_steps for number in range(num_steps)]
    steps_s = [*busy, *(15.0 + time_s for time_s in busy)]
    times_s, tokens = _with_idle(steps_s, [8.0] * len(steps_s))
    assert sorted(set(tokens)) == [0.0, 8.0] and list(times_s) == sorted(times_s)
    places = [place for place, value in enumerate(tokens) if value == 0.0]
    assert len(places) == 2 and places[1] == places[0] + 1
    assert [times_s[place] for place in places] == pytest.approx([5.0, 15.0], abs=0.2)
    assert _with_idle([1.0], [3.0]) == ([1.0], [3.0])


def test_a_result_without_pictures_is_still_a_table() -> None:
    """A result of another tool, which has no `report` part, breaks the page."""
    run = Run("vllm", {"completed": 3, "p99_ttft_ms": None, "request_throughput": 1.5})
    page = render([run], draw_all([run]), "x")
    assert "requests/s" in page and "1.50" in page and "<img" not in page
