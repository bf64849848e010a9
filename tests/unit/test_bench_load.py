"""`chunkserve bench load` from its flags to its files; what is wrong is one line and status 2."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from aiohttp import web

from serve_app.cli import main
from tests.unit.openai_stub import (
    MODEL,
    answer_events,
    complete,
    completion_events,
    list_models,
    serving_in_thread,
    sse,
)

SMALL = ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "4"]


def bench_load(*arguments: str) -> int:
    return main(["bench", "load", *arguments])


def saved(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("*.json")
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


def test_a_load_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result lacks requests or tokens, its definitions, or the keys that others read."""
    with serving_in_thread() as url:
        status = bench_load(
            *["--base-url", url, *SMALL, "--num-warmups", "2", "--max-concurrency", "2"],
            *["--goodput", "ttft:10000", "--save-detailed", "--result-dir", str(tmp_path)],
            *["--metadata", "version=7", "--percentile-metrics", "ttft", "--label", "mine"],
        )
    text = capsys.readouterr().out
    assert status == 0
    assert "completed / failed" in text and "6 / 0" in text and "TTFT" in text
    result = saved(tmp_path)
    expected = {"completed": 6, "failed": 0, "total_output_tokens": 24, "total_input_tokens": 24}
    expected |= {"model_id": MODEL, "max_concurrency": 2, "request_rate": "inf", "version": "7"}
    assert result.items() >= expected.items()
    assert result.keys() >= {"mean_ttft_ms", "p99_ttft_ms", "request_goodput", "duration", "date"}
    assert "p99_tpot_ms" not in result
    (log,) = tmp_path.glob("mine-infqps-concurrency2-stub-model-*.jsonl")
    assert len(log.read_text().splitlines()) == 6


def test_failed_requests_are_told_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that breaks under load yields figures of the rest, and no word of what broke."""
    num_asked = 0

    async def fail_later(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= 3:
            return await complete(request)
        return await answer_events(request, sse({"error": {"message": "no memory"}}))

    with serving_in_thread(fail_later) as url:
        assert bench_load("--base-url", url, *SMALL) == 0
    text = capsys.readouterr().out
    assert "2 / 4" in text and "4 failed: error event (no memory)" in text


def test_an_interrupt_keeps_what_has_ended(tmp_path: Path) -> None:
    """Ctrl-C loses hours of results, or counts requests that it cut off as failed."""
    num_asked = 0

    async def interrupt_at_fifth(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 5:
            os.kill(os.getpid(), signal.SIGINT)
            return await answer_events(request, sse(*completion_events(1)[:1]))
        return await complete(request)

    with serving_in_thread(interrupt_at_fifth) as url:
        more = ["--max-concurrency", "1", "--save-result", "--result-dir", str(tmp_path)]
        assert bench_load("--base-url", url, *SMALL, *more) == 130
    result = saved(tmp_path)
    assert result["interrupted"] is True
    assert (result["completed"], result["num_prompts"]) == (3, 6)


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    """A replay sends at once, or other lengths than the trace has."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * n, "input_length": 5, "output_length": n + 1} for n in range(3)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with serving_in_thread() as url:
        flags = ["--base-url", url, "--dataset-name", "trace", "--dataset-path", str(trace)]
        more = ["--time-scale", "0.05", "--save-result", "--result-dir", str(tmp_path)]
        assert bench_load(*flags, *more) == 0
    result = saved(tmp_path)
    assert (result["completed"], result["total_output_tokens"]) == (3, 6)
    assert 0.1 <= float(str(result["duration"]))


def test_a_kept_result_is_said_to_be_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is made of rate, model and date, and whoever wants to read it has to look for it."""
    with serving_in_thread() as url:
        flags = ["--base-url", url, "--num-prompts", "2", "--input-len", "4", "--output-len", "2"]
        assert bench_load(*flags, "--save-result", "--result-dir", str(tmp_path)) == 0
    (path,) = tmp_path.glob("*.json")
    assert capsys.readouterr().err.splitlines()[-1] == f"saved to {path}"


async def _html(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt-9"], "does not serve 'gpt-9'"),
        (["--endpoint", "/v2/completions"], "is not there"),
        (["--dataset-name", "trace"], "give --dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", "nowhere.jsonl"], "no trace nowhere.jsonl"),
        (["--dataset-name", "trace", "--dataset-path", "{empty}"], "the trace is empty"),
        (["--dataset-name", "lengths", "--dataset-path", "{odd}"], "no known columns"),
        (["--dataset-name", "trace", "--dataset-path", "{bare}"], "say --dataset-name lengths"),
        (["--dataset-name", "lengths", "--dataset-path", "{bare}"], "has 1 requests"),
        (["--length-scale", "0.5"], "change a file"),
        (["--self-timed"], "--self-timed needs requests with times"),
        (["--request-rate", "0"], "request rate must be above 0"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-end-rps", "3"], "needs --ramp-up-strategy"),
        (["--goodput", "speed:3"], "no SLO 'speed'"),
        (["--percentile-metrics", "ttfb"], "no metric 'ttfb'"),
        (["--metric-percentiles", "99,x"], "--metric-percentiles takes numbers"),
        (["--extra-body", "[1]"], "--extra-body takes a JSON object"),
        (["--max-concurrency", "0"], "--max-concurrency must be above 0"),
        (["--dataset-name", "synthetic", "--mix-short", "9-3"], "no lengths from 9 to 3"),
        (["--tokenizer", "/nowhere"], "no tokenizer from /nowhere"),
        (["--languages", "xx"], "no languages xx"),
        (["--metadata", "version"], "--metadata takes KEY=VALUE"),
        (["--header", "key"], "--header takes KEY=VALUE"),
        (["--random-prefix-len", "5"], "needs --tokenizer"),
        (["--timeout-s", "nan"], "--timeout-s must be above 0"),
        (["--ready-check-timeout-sec", "-1"], "must be 0 or more"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake ends in a traceback, or in a run of something else."""
    contents = {
        "empty": ("empty.jsonl", ""),
        "odd": ("odd.csv", "a,b\n1,2\n"),
        "bare": ("bare.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n"),
    }
    paths = {key: tmp_path / name for key, (name, _) in contents.items()}
    for key, (_, content) in contents.items():
        paths[key].write_text(content)
    with serving_in_thread() as url:
        status = bench_load("--base-url", url, *SMALL, *[flag.format(**paths) for flag in flags])
    error = capsys.readouterr().err
    assert status == 2
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_server_that_is_down_or_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A load against nothing, or against a web page, ends in a traceback."""
    with serving_in_thread(_html) as url:
        assert bench_load("--base-url", url, *SMALL) == 2
    assert bench_load("--base-url", url, *SMALL) == 2
    none, down = capsys.readouterr().err.splitlines()
    assert "does not answer as an OpenAI-compatible server" in none
    assert "refuses connections" in down


def test_what_users_of_vllm_type_reaches_the_server(tmp_path: Path) -> None:
    """A flag is taken and does nothing."""
    seen: dict[str, object] = {}

    async def remember(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        seen.update(path=request.path, header=request.headers.get("X-Team"))
        return await complete(request)

    with serving_in_thread(remember) as url:
        host, port = url.removeprefix("http://").split(":")
        address = ["--host", host, "--port", port, "--backend", "openai-chat"]
        flags = ["--header", "X-Team=a", "--temperature", "0.7", "--top-k", "3", "--disable-tqdm"]
        more = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4"]
        saving = ["--save-result", "--result-dir", str(tmp_path)]
        assert bench_load(*address, *flags, *more, *saving) == 0
    expected = {"temperature": 0.7, "top_k": 3, "ignore_eos": True, "header": "a"}
    assert seen.items() >= (expected | {"path": "/v1/chat/completions"}).items()
    assert "top_p" not in seen
    result = saved(tmp_path)
    assert (result["label"], result["backend"], result["ignore_eos"]) == (None, "openai-chat", True)
    assert result["max_concurrent_requests"] == 2 and result["max_output_tokens_per_s"] > 0


def test_a_server_that_refuses_ignore_eos_is_told_how_to_be_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers that are strict about fields cannot be measured, or nobody is told how."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        if "ignore_eos" in await request.json():
            return web.json_response({"error": {"message": "what is ignore_eos?"}}, status=400)
        return await complete(request)

    with serving_in_thread(refuse) as url:
        assert bench_load("--base-url", url, *SMALL) == 2
        assert "give --no-ignore-eos" in capsys.readouterr().err
        assert bench_load("--base-url", url, *SMALL, "--no-ignore-eos") == 0


def test_a_server_that_is_yet_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load begins before the server does, and ends at once."""
    monkeypatch.setattr("loadtest.target_check.READY_POLL_S", 0.0)
    num_asked = 0

    async def start_late(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        return web.Response(status=503) if num_asked < 3 else await list_models(request)

    with serving_in_thread(models=start_late) as url:
        assert bench_load("--base-url", url, *SMALL) == 2
        assert bench_load("--base-url", url, *SMALL, "--ready-check-timeout-sec", "60") == 0
    assert num_asked == 3


def test_a_url_without_a_scheme_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger's `localhost:8000` is a broken stream."""
    assert bench_load("--base-url", "localhost:8000", *SMALL) == 2
    assert "begins with http://" in capsys.readouterr().err
