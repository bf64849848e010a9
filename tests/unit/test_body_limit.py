"""How large a body may be, and that no more of it than that is ever held (B20, B64)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_doubles import ScriptedBackend
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from deployments.config import AdmissionConfig, ServiceConfig
from serve_app.body_limit import BodyLimit
from serve_app.errors import install_error_handlers
from serve_app.ingress import make_api

LIMIT = 1000


def make_app() -> FastAPI:
    api = FastAPI()
    install_error_handlers(api)

    @api.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @api.post("/parsed")
    async def parsed(body: dict[str, Any]) -> int:
        return len(body)

    @api.post("/forgiving")
    async def forgiving(request: Request) -> str:
        try:
            await request.body()
        except Exception:
            return "an answer in spite of it"
        return "ok"

    @api.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"one", b"two"]))

    api.add_middleware(BodyLimit, max_bytes=LIMIT)
    return api


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_app())


def chunked(num_bytes: int) -> Iterator[bytes]:
    for start in range(0, num_bytes, 100):
        yield b" " * min(100, num_bytes - start)


@pytest.mark.parametrize("path", ["/raw", "/parsed", "/forgiving"])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_body_over_the_limit_is_413_in_openais_shape(
    client: TestClient, path: str, is_chunked: bool
) -> None:
    """B20: a body of 100 MB was read and parsed; or a framework turned the refusal into a 400 or
    a success of its own.
    """
    body = chunked(LIMIT + 1) if is_chunked else b" " * (LIMIT + 1)
    answer = client.post(path, content=body)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "request_too_large" and str(LIMIT) in error["message"]
    assert answer.headers["connection"] == "close"


def test_a_body_of_just_the_limit_passes(client: TestClient) -> None:
    """The limit is off by one."""
    assert client.post("/raw", content=b" " * LIMIT).json() == LIMIT
    assert client.post("/raw", content=chunked(LIMIT)).json() == LIMIT
    assert client.post("/stream", content=b"").content == b"onetwo"


def http_scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}


class Wire:
    """A client that sends `num_chunks` pieces of 100 bytes."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self.num_read = 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        self.num_read += 1
        more = self.num_read < self._num_chunks
        return {"type": "http.request", "body": b" " * 100, "more_body": more}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if "status" in message]


async def never(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("the application was asked")


@pytest.mark.parametrize("declared", [b"1001", b"104857600", b"9" * 4000, b"00002000"])
def test_a_declared_body_over_the_limit_is_never_read(declared: bytes) -> None:
    """B64: an oversize body is refused by its declared length only after all of it came."""
    wire = Wire(1_000_000)
    scope = http_scope((b"content-length", declared))
    asyncio.run(BodyLimit(never, LIMIT)(scope, wire.receive, wire.send))
    assert wire.statuses == [413] and wire.num_read == 0


@pytest.mark.parametrize(
    "headers", [(), ((b"content-length", b"5"),), ((b"content-length", b"-1"),)]
)
def test_a_body_without_a_true_length_is_cut_off_at_the_limit(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    """B20: memory grows with a chunked body that never ends, or whose declared length is a lie."""

    async def read_all(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    wire = Wire(1_000_000)
    app = BodyLimit(read_all, LIMIT)
    asyncio.run(app(http_scope(*headers), wire.receive, wire.send))
    assert wire.statuses == [413] and wire.num_read == LIMIT // 100 + 1


def test_an_answer_that_has_begun_is_not_answered_twice() -> None:
    """An application that answers while it reads gets a second head in the midst of its answer."""

    async def eager(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await receive()

    wire = Wire(1_000_000)
    with pytest.raises(Exception, match="larger than"):
        asyncio.run(BodyLimit(eager, LIMIT)(http_scope(), wire.receive, wire.send))
    assert wire.statuses == [200]


def test_a_fault_of_the_application_stays_its_own() -> None:
    """Every fault of the application looks like a body that is too large, or like none."""

    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RuntimeError("broken")

    wire = Wire(1)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(BodyLimit(broken, LIMIT)(http_scope(), wire.receive, wire.send))
    assert wire.sent == []


def test_the_service_refuses_a_long_body_of_any_route() -> None:
    """B20: the service itself, not only a small application, reads what it need not."""
    api = make_api(ScriptedBackend([[65]]), ServiceConfig())
    api.add_middleware(BodyLimit, max_bytes=LIMIT)
    client = TestClient(api)
    for path in ("/v1/completions", "/v1/chat/completions", "/chunk"):
        for body in (b" " * 2000, chunked(2000)):
            assert client.post(path, content=body).status_code == 413
    assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_the_longest_context_fits_into_the_default_limit() -> None:
    """The default refuses by bytes what the model's context of 128k tokens would take."""
    limit, num_tokens = AdmissionConfig().max_body_bytes, 128 * 1024
    ids = json.dumps({"prompt": [151_642] * num_tokens})
    # Two characters a token, each escaped, is more than any common script needs.
    text = json.dumps({"prompt": "\u4e2d\u6587" * num_tokens})
    assert len(ids) < limit and len(text) < limit
