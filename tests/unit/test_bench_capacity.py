"""`chunkserve bench capacity`: a rate is judged by the SLO, the failures and the queue."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from loadtest.bench_capacity import caution_of, keeps_slo
from loadtest.measures import Measures, RequestRecord, Slo, Summary
from serve_app.cli import main
from tests.unit.openai_stub import complete, serving_in_thread

SMALL = ["--num-prompts", "20", "--random-input-len", "8", "--random-output-len", "2"]
SMALL += ["--start-rate", "200", "--highest-rate", "400", "--lowest-rate", "100"]


def summary(slo: Slo, *ttfts_s: float, num_failed: int = 0) -> Summary:
    measures = Measures(slo)
    for ttft_s in ttfts_s:
        measures.add(RequestRecord(0.0, 0.0, 1, [ttft_s, ttft_s + 0.1], ttft_s + 0.1))
    for _ in range(num_failed):
        measures.add(RequestRecord(0.0, 0.0, 1, [], 1.0, error="timeout"))
    return measures.summary(1.0)


def test_the_slo_is_kept_by_the_percentile_of_each_metric() -> None:
    """One slow request fails a p90, or many pass it; a metric without bound is judged."""
    slo = Slo(ttft_s=1.0)
    assert keeps_slo(summary(slo, *[0.5] * 19, 9.0), 90.0)
    assert not keeps_slo(summary(slo, *[0.5] * 8, 9.0, 9.0), 90.0)
    assert not keeps_slo(summary(Slo(ttft_s=1.0, itl_s=0.05), 0.5), 90.0)


def test_failed_requests_miss_the_slo() -> None:
    """A server that refuses half of the load sustains any rate."""
    assert keeps_slo(summary(Slo(ttft_s=1.0), *[0.5] * 19, num_failed=1), 90.0)
    assert not keeps_slo(summary(Slo(ttft_s=1.0), *[0.5] * 8, num_failed=2), 90.0)
    assert not keeps_slo(summary(Slo(ttft_s=1.0), num_failed=1), 90.0)


def test_a_search_tells_its_trials(capsys: pytest.CaptureFixture[str]) -> None:
    """The search stops early, tries what it was told not to, or hides what it tried."""
    with serving_in_thread() as url:
        status = main(["bench", "capacity", "--base-url", url, *SMALL, "--goodput", "ttft:9999"])
    result = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (result["capacity"], result["lowest_rate_not_sustained"]) == (400.0, None)
    assert [row["request_rate"] for row in result["sweep"]] == [200.0, 400.0]
    assert all(row["p99_ttft_ms"] > 0 and row["completed"] for row in result["sweep"])


def test_a_load_of_a_moment_sustains_nothing_and_says_so() -> None:
    """Twelve requests are over before a queue can grow, and a rate far too high is believed."""
    told = caution_of(8.0, 12)
    assert told is not None and "within 1.5 s" in told and "--num-prompts 240" in told
    assert caution_of(8.0, 240) is None and caution_of(0.0, 12) is None


def test_no_capacity_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """An SLO that nothing keeps yields the lowest rate as capacity."""
    with serving_in_thread() as url:
        flags = ["--base-url", url, *SMALL, "--goodput", "ttft:0.001"]
        assert main(["bench", "capacity", *flags]) == 1
    assert json.loads(capsys.readouterr().out)["capacity"] == 0.0


def test_a_server_that_serves_nothing_has_no_idle_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that only survives the check is searched, or ends in a traceback."""
    num_asked = 0

    async def serve_one(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        return await complete(request) if num_asked == 1 else web.Response(status=503)

    with serving_in_thread(serve_one) as url:
        assert main(["bench", "capacity", "--base-url", url, *SMALL, "--goodput", "ttft:9"]) == 2
    assert "no single request completes on the idle server: status 503" in capsys.readouterr().err
