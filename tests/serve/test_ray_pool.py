"""What Ray's failures mean to a request, with a handle that fails on cue; no Ray is started."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.config import parse_service_config
from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Seat,
    TokenChunk,
)
from serve_app.errors import BackendUnavailable
from serve_app.ray_pool import RayPool

REQUEST = GenerateRequest("a", (1, 2), SamplingParams())
TOKEN = TokenChunk("a", [1])
END = TokenChunk("a", finish_reason=FinishReason.STOP, num_preceding=1)
ANSWER = replace(END, token_ids=[1], num_preceding=0)
"""Both as one, as they are read if nothing comes between."""
SILENT = object()


class FakeStream:
    def __init__(self, script: list[Any]) -> None:
        self._script = script
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            if item is SILENT:
                await asyncio.Event().wait()
            yield item


class FakeHandle:
    """Gives one script to each call; answers of broadcasts are fixed."""

    def __init__(self, *scripts: list[Any], answers: list[Any] | Exception = ()) -> None:  # type: ignore[assignment]
        self.streams = [FakeStream(script) for script in scripts]
        self.requests: list[GenerateRequest] = []
        self.contexts: list[contextvars.Context] = []
        self.num_broadcasts = 0
        self.options_asked: list[dict[str, Any]] = []
        self._answers = answers

    def options(self, **options: Any) -> FakeHandle:
        self.options_asked.append(options)
        return self

    def remote(self, request: GenerateRequest, _seat: Seat) -> FakeStream:
        self.requests.append(request)
        self.contexts.append(contextvars.copy_context())
        return self.streams[self.num_calls - 1]

    @property
    def num_calls(self) -> int:
        return len(self.requests)

    def running_replicas_populated(self) -> bool:
        return True

    def broadcast(self, _method: str) -> FakeHandle:
        self.num_broadcasts += 1
        return self

    async def _fetch_replica_results_async(self) -> list[FakeAnswer]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return [FakeAnswer(answer) for answer in self._answers]


class FakeAnswer:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is SILENT:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def make_pool(handle: FakeHandle, **settings: Any) -> RayPool:
    config = parse_service_config({"pool": {"num_replicas": 2, **settings}})
    return RayPool("pool 'a'", handle, config)  # type: ignore[arg-type]


def read(handle: FakeHandle) -> list[TokenChunk]:
    async def scenario() -> list[TokenChunk]:
        backend = make_pool(handle)
        return [chunk async for chunk in backend.generate(REQUEST)]

    return asyncio.run(scenario())


def test_a_replica_lost_before_the_first_token_is_replaced() -> None:
    """A request fails although no token of it was seen and another replica could serve it."""
    handle = FakeHandle([ActorDiedError()], [TOKEN, END])
    assert read(handle) == [ANSWER]


def test_retries_are_bounded() -> None:
    """A request that kills replicas is sent to one after the other."""
    handle = FakeHandle(*[[ActorDiedError()]] * 4)
    (chunk,) = read(handle)
    assert handle.num_calls == 2
    assert chunk.error is not None and chunk.error.kind is ErrorKind.ENGINE


def test_a_replica_lost_after_the_first_token_is_an_error() -> None:
    """Tokens are sent twice, or the answer seems complete, when a replica dies midway."""
    handle = FakeHandle([TOKEN, ActorDiedError()], [TOKEN, END])
    first, last = read(handle)
    assert (first, handle.num_calls) == (TOKEN, 1)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and last.error.kind is ErrorKind.ENGINE


@pytest.mark.parametrize(
    "failure, kind",
    [
        (BackPressureError(1, 1), ErrorKind.OVERLOADED),
        (DeploymentUnavailableError("x"), ErrorKind.UNAVAILABLE),
    ],
)
def test_refusals_of_serve_are_not_retried(failure: Exception, kind: ErrorKind) -> None:
    """A full service is asked again at once, or its refusal becomes a 500."""
    handle = FakeHandle([failure])
    (chunk,) = read(handle)
    assert chunk.error is not None and chunk.error.kind is kind
    assert (handle.num_calls, handle.streams[0].num_cancels) == (1, 0)


def test_closing_cancels_the_stream_once() -> None:
    """A reader that leaves relies on implicit cancellation, which loses requests."""

    async def scenario(handle: FakeHandle) -> int:
        chunks = make_pool(handle).generate(REQUEST)
        assert await anext(chunks) == TOKEN
        await chunks.aclose()
        return handle.streams[0].num_cancels

    assert asyncio.run(scenario(FakeHandle([TOKEN, SILENT]))) == 1


def test_a_finished_stream_is_not_cancelled() -> None:
    """Every finished request costs a cancellation."""
    handle = FakeHandle([TOKEN, END])
    read(handle)
    assert handle.streams[0].num_cancels == 0


def test_handles_stream_by_value_and_cards_travel_by_reference() -> None:
    """Tokens go through the object store, or a tokenizer exceeds the message limit."""
    handle = FakeHandle()
    make_pool(handle)
    by_method = {options["method_name"]: options for options in handle.options_asked}
    assert by_method["generate"] | {"stream": True} == by_method["generate"]
    assert by_method["generate"]["_by_reference"] is False
    assert by_method["model_card"]["_by_reference"] is True


@pytest.mark.parametrize("answers", [[], [RuntimeError("dead")], TimeoutError("late")])
def test_health_fails_when_no_replica_is_well(answers: Any) -> None:
    """/health says 200 while every replica is dead, missing or silent."""
    backend = make_pool(FakeHandle(answers=answers))
    with pytest.raises(BackendUnavailable):
        asyncio.run(backend.check_health())


def test_health_holds_while_one_replica_is_well() -> None:
    """One sick replica takes the whole service out of traffic."""
    backend = make_pool(FakeHandle(answers=[RuntimeError("dead"), None]))
    asyncio.run(backend.check_health())


def test_a_remote_trace_stays_in_the_log() -> None:
    """The stack trace of a replica reaches the client of /health."""
    failure = RayTaskError(
        "check_health", "Traceback\n  File secret\n", RuntimeError("engine died")
    )
    backend = make_pool(FakeHandle(answers=[failure]))
    with pytest.raises(BackendUnavailable, match="^pool 'a': engine died$"):
        asyncio.run(backend.check_health())


def test_a_replica_that_says_it_serves_nobody_is_passed_over() -> None:
    """A dead engine has the shortest queue, so it draws all traffic and refuses it."""
    gone = TokenChunk(
        "a", finish_reason=FinishReason.ERROR, error=ErrorInfo(ErrorKind.UNAVAILABLE, "stopped")
    )
    handle = FakeHandle([gone], [TOKEN, END])
    assert read(handle) == [ANSWER]
    everywhere = FakeHandle([gone], [gone])
    assert read(everywhere) == [gone]
    assert everywhere.num_calls == 2


def test_a_retry_is_the_same_request_and_is_counted() -> None:
    """A router that meets a request again must know it, to send it to another replica than the one
    that did not serve it; and nobody sees how often that happens."""
    handle = FakeHandle([ActorDiedError()], [TOKEN, END])

    async def scenario() -> RayPool:
        pool = make_pool(handle)
        assert [chunk async for chunk in pool.generate(REQUEST)] == [ANSWER]
        return pool

    counters = asyncio.run(scenario()).counters
    assert [request.request_id for request in handle.requests] == ["a", "a"]
    assert (counters.num_retries, counters.num_lost, counters.num_refused) == (1, 0, 0)


def test_every_call_has_a_context_of_its_own() -> None:
    """Calls of one HTTP request share its Serve id, and Serve's router, which tells calls apart by
    it, never sends the second of two that it routes at once."""
    request_id = contextvars.ContextVar("request_id", default="fresh")
    handle = FakeHandle([TOKEN, END])
    request_id.set("of the HTTP request")
    read(handle)
    assert request_id not in handle.contexts[0]


def test_a_stream_without_an_end_is_an_error() -> None:
    """A replica that stops sending makes half an answer look like a whole one, or leaves its client
    without any word."""
    for script in ([TOKEN], []):
        *_, last = read(FakeHandle(script))
        assert last.error is not None and last.error.kind is ErrorKind.ENGINE


def test_nobody_waits_for_ever_while_there_is_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas of a pool died and none comes up: its requests hang."""
    monkeypatch.setattr("serve_app.ray_pool.PROBE_S", 0.01)
    handle = FakeHandle([SILENT], answers=DeploymentUnavailableError("x"))

    async def scenario() -> list[TokenChunk]:
        pool = make_pool(handle, no_replica_timeout_s=0.05)
        return [chunk async for chunk in pool.generate(REQUEST)]

    (chunk,) = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert chunk.error is not None and chunk.error.kind is ErrorKind.UNAVAILABLE
    assert "pool 'a' has no running replica" in chunk.error.message
    assert handle.streams[0].num_cancels == 1


def test_a_long_queue_is_waited_for_while_a_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first token that takes longer than no_replica_timeout_s is taken for a dead pool; or each
    waiting request asks all replicas by itself."""
    monkeypatch.setattr("serve_app.ray_pool.PROBE_S", 0.01)
    handle = FakeHandle(*[[SILENT]] * 20, answers=["stats"])

    async def scenario() -> None:
        pool = make_pool(handle, no_replica_timeout_s=0.05)
        reading = [asyncio.ensure_future(anext(pool.generate(REQUEST))) for _ in range(20)]
        done, waiting = await asyncio.wait(reading, timeout=0.3)
        assert not done
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

    asyncio.run(scenario())
    assert 2 <= handle.num_broadcasts <= 31  # one a period, not one a request and period


def test_one_silent_replica_keeps_no_answer_of_another_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/health is 503 and /stats is empty because one of several replicas does not answer."""
    monkeypatch.setattr("serve_app.ray_pool.CONTROL_TIMEOUT_S", 0.05)
    pool = make_pool(FakeHandle(answers=[SILENT, None]))
    asyncio.run(pool.check_health())
    silent, answer = asyncio.run(pool.ask_all("stats"))
    assert isinstance(silent, (TimeoutError, asyncio.TimeoutError)) and answer is None
    with pytest.raises(BackendUnavailable, match="TimeoutError"):
        asyncio.run(make_pool(FakeHandle(answers=[SILENT, SILENT])).check_health())


def test_a_dead_pool_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """After an engine died every request logs a trace, and the cause is lost among them (B68)."""
    handle = FakeHandle(*[[TOKEN, ActorDiedError()]] * 200)

    async def scenario() -> None:
        pool = make_pool(handle)
        for _ in range(200):
            _ = [chunk async for chunk in pool.generate(REQUEST)]

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert 1 <= len(caplog.records) < 50
    assert all(record.exc_info is None and "\n" not in record.message for record in caplog.records)


def test_only_a_pool_that_can_choose_by_prefix_hashes_prompts() -> None:
    """A pool of one replica pays for hashes that nobody reads; one of two is routed blindly."""
    prompt = replace(REQUEST, prompt_token_ids=tuple(range(33)))

    def hashes_sent(**settings: Any) -> int:
        handle = FakeHandle([ANSWER])

        async def scenario() -> None:
            _ = [chunk async for chunk in make_pool(handle, **settings).generate(prompt)]

        asyncio.run(scenario())
        return len(handle.requests[0].block_hashes)

    assert hashes_sent() == 2
    assert hashes_sent(num_replicas=1) == hashes_sent(routing={"policy": "serve"}) == 0
