"""A client that leaves ends its request, at any moment (public faults B58, B59, B64)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from api_doubles import ScriptedBackend, make_tokenizer

from deployments.config import ServiceConfig
from deployments.protocol import FinishReason, GenerateRequest, SamplingParams
from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.ingress import make_api
from serve_app.streaming import TextRules, TextStream

TOKENIZER = make_tokenizer()


class Client:
    """One request over bare ASGI, whose client leaves when told to."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self.left = asyncio.Event()
        self.got_text = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if b"hello" in message.get("body", b""):
            self.got_text.set()

    async def call(self, api: Any, spec_version: str) -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions",
            "asgi": {"version": "3.0", "spec_version": spec_version}, "scheme": "http",
            "raw_path": b"/v1/completions", "root_path": "", "query_string": b"", "headers": [],
            "client": None, "server": None,
        }  # fmt: skip
        await api(scope, self.receive, self.send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_leaving_closes_the_token_stream(stream: bool, has_begun: bool) -> None:
    """A request whose client left runs on in the engine."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")] if has_begun else [], hangs=True)
        client = Client({"prompt": "hi", "stream": stream})
        call = asyncio.create_task(client.call(make_api(backend, ServiceConfig()), "2.3"))
        await backend.has_hung.wait()
        if stream and has_begun:
            await client.got_text.wait()
        client.left.set()
        await asyncio.wait_for(call, 5)
        assert client.got_text.is_set() == (stream and has_begun)
        # Read here: when the loop ends, Python closes what was left open.
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_handler_closes_the_token_stream(stream: bool) -> None:
    """Serve cancels the handler when a client leaves, and the engine goes on."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        client = Client({"prompt": "hi", "stream": stream})
        call = asyncio.create_task(client.call(make_api(backend, ServiceConfig()), "2.4"))
        await backend.has_hung.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        # Read here: when the loop ends, Python closes what was left open.
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_receive_that_fails_is_a_client_that_left(stream: bool) -> None:
    """Serve's receive raises when a request is cancelled, and each of them logs a trace."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        client = Client({"prompt": "hi", "stream": stream})
        receive = client.receive

        async def receive_or_fail() -> dict[str, Any]:
            if (message := await receive())["type"] == "http.disconnect":
                raise RuntimeError("the proxy cancelled this request")
            return message

        client.receive = receive_or_fail  # type: ignore[method-assign]
        call = asyncio.create_task(client.call(make_api(backend, ServiceConfig()), "2.3"))
        await backend.has_hung.wait()
        client.left.set()
        await asyncio.wait_for(call, 5)
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


def test_a_send_that_fails_closes_the_token_stream() -> None:
    """A server that reports the lost client through send leaves the stream open."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        client = Client({"prompt": "hi", "stream": True})

        async def send(message: dict[str, Any]) -> None:
            raise OSError("gone")

        client.send = send  # type: ignore[method-assign]
        await asyncio.gather(
            client.call(make_api(backend, ServiceConfig()), "2.4"), return_exceptions=True
        )
        # Read here: when the loop ends, Python closes what was left open.
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_closes_all_choices(stream: bool) -> None:
    """Of several choices only the first one ends with its client."""

    async def scenario() -> tuple[int, int]:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        client = Client({"prompt": ["hi", "hello"], "n": 2, "stream": stream})
        call = asyncio.create_task(client.call(make_api(backend, ServiceConfig()), "2.3"))
        await backend.has_hung.wait()
        client.left.set()
        await asyncio.wait_for(call, 5)
        # Read here: when the loop ends, Python closes what was left open.
        return len(backend.requests), backend.num_closed

    assert asyncio.run(scenario()) == (4, 4)


def test_a_stop_string_closes_the_token_stream() -> None:
    """The engine goes on with a request whose text has ended."""

    async def scenario() -> int:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        request = GenerateRequest("a", (1,), SamplingParams())
        source = backend.generate(request)  # kept, or Python would close it
        stream = TextStream(
            source, IncrementalDetokenizer(TOKENIZER, [1]), TextRules(stops=("ll",))
        )
        deltas = stream.deltas()
        last = [delta async for delta in deltas][-1]
        assert (last.text, last.finish_reason) == ("he", FinishReason.STOP)
        return backend.num_closed

    assert asyncio.run(scenario()) == 1


def test_two_hundred_that_leave_at_once_all_end() -> None:
    """Cancelling many streams at once leaves some of them running."""

    async def scenario() -> tuple[int, int]:
        backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
        api = make_api(backend, ServiceConfig())
        clients = [Client({"prompt": "hi", "stream": index % 2 == 0}) for index in range(200)]
        calls = [asyncio.create_task(client.call(api, "2.3")) for client in clients]
        await asyncio.gather(*(client.got_text.wait() for client in clients[::2]))
        for client in clients:
            client.left.set()
        await asyncio.wait_for(asyncio.gather(*calls), 10)
        return len(backend.requests), backend.num_closed

    started, closed = asyncio.run(scenario())
    assert 100 <= started == closed


def test_a_long_prompt_leaves_the_event_loop_alone() -> None:
    """Tokenizing a huge prompt on the event loop freezes every other request."""

    async def scenario() -> tuple[bool, int]:
        api = make_api(ScriptedBackend(), ServiceConfig())
        await Client({"prompt": "hi"}).call(api, "2.3")
        call = asyncio.create_task(Client({"prompt": "hello time " * 40000}).call(api, "2.3"))
        num_turns = 0
        while not call.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return call.exception() is None, num_turns

    succeeded, num_turns = asyncio.run(scenario())
    # On the event loop there would be a handful of turns, one for each await on the way.
    assert succeeded and num_turns > 50
