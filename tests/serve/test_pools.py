"""What Ray's failures mean to a request, with a handle that fails on cue; no Ray is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from serve_app.errors import BackendUnavailable
from serve_app.pools import RayBackend

REQUEST = GenerateRequest("a", (1, 2), SamplingParams())
TOKEN = TokenChunk("a", [1])
END = TokenChunk("a", finish_reason=FinishReason.STOP)


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
            yield item


class FakeHandle:
    """Gives one script to each call; answers of broadcasts are fixed."""

    def __init__(self, *scripts: list[Any], answers: list[Any] | Exception = ()) -> None:  # type: ignore[assignment]
        self.streams = [FakeStream(script) for script in scripts]
        self.num_calls = 0
        self.options_asked: list[dict[str, Any]] = []
        self._answers = answers

    def options(self, **options: Any) -> FakeHandle:
        self.options_asked.append(options)
        return self

    def remote(self, _request: GenerateRequest) -> FakeStream:
        self.num_calls += 1
        return self.streams[self.num_calls - 1]

    def broadcast(self, _method: str) -> FakeHandle:
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


def read(handle: FakeHandle) -> list[TokenChunk]:
    async def scenario() -> list[TokenChunk]:
        backend = RayBackend(handle)  # type: ignore[arg-type]
        return [chunk async for chunk in backend.generate(REQUEST)]

    return asyncio.run(scenario())


def test_a_replica_lost_before_the_first_token_is_replaced() -> None:
    """A request fails although no token of it was seen and another replica could serve it."""
    handle = FakeHandle([ActorDiedError()], [ActorDiedError()], [TOKEN, END])
    assert read(handle) == [TOKEN, END]


def test_retries_are_bounded() -> None:
    """A request that kills replicas is sent to one after the other."""
    handle = FakeHandle(*[[ActorDiedError()]] * 4)
    (chunk,) = read(handle)
    assert handle.num_calls == 3
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
        chunks = RayBackend(handle).generate(REQUEST)  # type: ignore[arg-type]
        assert await anext(chunks) == TOKEN
        await chunks.aclose()
        return handle.streams[0].num_cancels

    assert asyncio.run(scenario(FakeHandle([TOKEN, TOKEN, END]))) == 1


def test_a_finished_stream_is_not_cancelled() -> None:
    """Every finished request costs a cancellation."""
    handle = FakeHandle([TOKEN, END])
    read(handle)
    assert handle.streams[0].num_cancels == 0


def test_handles_stream_by_value_and_cards_travel_by_reference() -> None:
    """Tokens go through the object store, or a tokenizer exceeds the message limit."""
    handle = FakeHandle()
    RayBackend(handle)  # type: ignore[arg-type]
    by_method = {options["method_name"]: options for options in handle.options_asked}
    assert by_method["generate"] | {"stream": True} == by_method["generate"]
    assert by_method["generate"]["_by_reference"] is False
    assert by_method["model_card"]["_by_reference"] is True


@pytest.mark.parametrize("answers", [[], [RuntimeError("dead")], TimeoutError("late")])
def test_health_fails_when_no_replica_is_well(answers: Any) -> None:
    """/health says 200 while every replica is dead, missing or silent."""
    backend = RayBackend(FakeHandle(answers=answers))  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable):
        asyncio.run(backend.check_health())


def test_health_holds_while_one_replica_is_well() -> None:
    """One sick replica takes the whole service out of traffic."""
    backend = RayBackend(FakeHandle(answers=[RuntimeError("dead"), None]))  # type: ignore[arg-type]
    asyncio.run(backend.check_health())


def test_a_remote_trace_stays_in_the_log() -> None:
    """The stack trace of a replica reaches the client of /health."""
    failure = RayTaskError(
        "check_health", "Traceback\n  File secret\n", RuntimeError("engine died")
    )
    backend = RayBackend(FakeHandle(answers=[failure]))  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="^engine died$"):
        asyncio.run(backend.check_health())


def test_a_replica_that_says_it_serves_nobody_is_passed_over() -> None:
    """A dead engine has the shortest queue, so it draws all traffic and refuses it."""
    gone = TokenChunk(
        "a", finish_reason=FinishReason.ERROR, error=ErrorInfo(ErrorKind.UNAVAILABLE, "stopped")
    )
    handle = FakeHandle([gone], [TOKEN, END])
    assert read(handle) == [TOKEN, END]
    everywhere = FakeHandle([gone], [gone], [gone])
    assert read(everywhere) == [gone]
    assert everywhere.num_calls == 3
