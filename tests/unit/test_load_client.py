"""The client tells every end of a request by its kind, and when each token came."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from loadtest.client import Answer, Ask, Client, Target, body_of
from tests.unit.openai_stub import (
    MODEL,
    Handler,
    answer_events,
    complete,
    completion_events,
    serving,
    sse,
)


def send(handler: Handler, timeout_s: float = 5.0) -> Answer:
    """The end of one request to this handler."""

    async def ask() -> Answer:
        async with serving(handler) as url:
            target = Target(url, "/v1/completions", MODEL, timeout_s=timeout_s)
            async with Client(target) as client:
                return await client.send(Ask("hello", 3))

    return asyncio.run(ask())


def test_a_good_answer_has_one_time_a_token() -> None:
    """Tokens are lost, or their times lie outside of the request."""
    answer = send(complete)
    assert answer.fault is None and answer.streamed is not None
    times_s = list(answer.streamed.token_times_s)
    assert len(times_s) == 3
    assert [answer.sent_s, *times_s, answer.end_s] == sorted(
        [answer.sent_s, *times_s, answer.end_s]
    )


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too many"}}, status=429)


async def _whole(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "not streamed"}]})


async def _fail_within(request: web.Request) -> web.StreamResponse:
    events = completion_events(2)[:1]
    return await answer_events(request, sse(*events, {"error": {"message": "engine died"}}))


async def _end_early(request: web.Request) -> web.StreamResponse:
    return await answer_events(request, sse(*completion_events(3)[:2]))


async def _drop(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(sse(completion_events(3)[0]))
    assert request.transport is not None
    request.transport.close()
    return response


async def _hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("handler", "kind", "detail"),
    [
        (_refuse, "status 429", "too many"),
        (_whole, "not OpenAI's shape", "application/json"),
        (_fail_within, "error event", "engine died"),
        (_end_early, "broken stream", "without its end"),
        (_drop, "broken stream", ""),
    ],
)
def test_faults_are_told_by_kind(handler: Handler, kind: str, detail: str) -> None:
    """A fault is raised, passes for a good answer, or is counted as another one."""
    answer = send(handler)
    assert answer.streamed is None and answer.fault is not None
    assert answer.fault.kind == kind
    assert detail in str(answer.fault)


def test_an_answer_that_does_not_end_is_a_timeout() -> None:
    """One silent request holds the load forever."""
    answer = send(_hang, timeout_s=0.05)
    assert answer.fault is not None and answer.fault.kind == "timeout"


def test_a_server_that_is_down_refuses() -> None:
    """A closed port raises."""

    async def ask() -> Answer:
        async with serving() as url:
            pass
        async with Client(Target(url, "/v1/completions", MODEL)) as client:
            return await client.send(Ask("hello", 3))

    answer = asyncio.run(ask())
    assert answer.fault is not None and answer.fault.kind == "connection refused"


def test_a_kept_connection_that_the_server_has_closed_is_no_fault() -> None:
    """llama.cpp's server closes connections between two requests: 13 of 64 answers were counted as
    its failures.
    """
    answered: list[object] = []
    num_dropped = 0

    async def answer_once(request: web.Request) -> web.StreamResponse:
        nonlocal num_dropped
        assert request.transport is not None
        if request.transport in answered:
            num_dropped += 1
            request.transport.close()
            return web.Response()
        answered.append(request.transport)
        return await complete(request)

    async def ask() -> list[Answer]:
        async with serving(answer_once) as url:
            async with Client(Target(url, "/v1/completions", MODEL)) as client:
                first = await asyncio.gather(*(client.send(Ask("hello", 3)) for _ in range(3)))
                return [*first, *[await client.send(Ask("hello", 3)) for _ in range(3)]]

    answers = asyncio.run(ask())
    assert [answer.fault for answer in answers] == [None] * 6
    assert num_dropped >= 3, "connections were kept, and ended"


def test_a_fresh_connection_that_ends_is_a_fault() -> None:
    """Asking again for ever where a server ends every connection."""

    async def drop(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    answer = send(drop)
    assert answer.fault is not None and answer.fault.kind == "broken stream"


def test_a_v1_at_the_end_of_the_base_url_is_not_doubled() -> None:
    """The base URL that OpenAI's clients take asks for /v1/v1/completions."""
    for base_url in ("http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"):
        assert Target(base_url, "", "").url("/v1/models") == "http://host:1/v1/models"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_bodies_hold_what_was_asked(endpoint: str, expected: dict[str, Any]) -> None:
    """A route is asked in the other route's shape, or fields that servers refuse are sent bare."""
    body = body_of(Target("", endpoint, MODEL, extra_body={"top_p": 0.5}), Ask("hi", 3))
    assert body.items() >= {**expected, "max_tokens": 3, "top_p": 0.5}.items()
    assert not body.keys() & {"ignore_eos", "priority"}
    more = body_of(Target("", endpoint, MODEL, ignores_eos=True), Ask("hi", 3, priority=1))
    assert more.items() >= {"ignore_eos": True, "priority": 1}.items()
