"""Sends one request to an OpenAI-compatible server and tells what came back, and when.

Speaks `/v1/completions` and `/v1/chat/completions`, streamed. Every end is an `Answer`: a fault of
the server or of the network is one too, and never raised, so that a load goes on. Does not know
when requests are sent (`load_run` does) or what the times mean (`measures` does).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from loadtest.stream_reader import (
    BROKEN_STREAM,
    NOT_OPENAI,
    AnswerFault,
    AnswerReader,
    SseLines,
    StreamedAnswer,
    error_message,
)

CONNECTION_REFUSED = "connection refused"
CANNOT_CONNECT = "cannot connect"
TIMEOUT = "timeout"
IDLE_CONNECTION_S = 2.0
"""Kept connections are left before any usual server closes them (uvicorn: 5 s), so that few
requests are written into one that is just being closed."""
MAX_ERROR_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked, and how.

    Args:
        base_url: scheme, host and port, with a path if the server has one; a last `/v1` is dropped.
        endpoint: path of the route below it; one that ends in `/chat/completions` takes chats.
        model: name sent with each request.
        api_key: sent as bearer token.
        headers: sent with each request.
        extra_body: fields added to each body; they win over those of the client.
        ignores_eos: whether answers always have `max_tokens` tokens.
        verifies_tls: whether the certificate of an https server has to be good.
        has_running_usage: whether each event shall tell the number of tokens so far.
        timeout_s: from sending to the end of the answer.
    """

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ignores_eos: bool = False
    verifies_tls: bool = True
    has_running_usage: bool = True
    timeout_s: float = 3600.0

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as chats, which take text alone."""
        return self.endpoint.endswith("/chat/completions")

    def url(self, path: str) -> str:
        """Where a path of the server is."""
        base_url = self.base_url.rstrip("/")
        if path.startswith("/v1/"):
            base_url = base_url.removesuffix("/v1")
        return base_url + path


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a text, or token ids where the server takes them (completions alone)."""

    prompt: str | Sequence[int]
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one request. Times are seconds of `time.monotonic()`.

    Exactly one of `streamed` and `fault` is there.
    """

    sent_s: float
    end_s: float
    streamed: StreamedAnswer | None
    fault: AnswerFault | None


@dataclass(slots=True)
class _Connection:
    """The connection that a request went by."""

    was_kept: bool = False
    """Whether another request had gone by it before."""


async def _note_kept(_: object, context: Any, __: object) -> None:
    context.trace_request_ctx.was_kept = True


def body_of(target: Target, ask: Ask) -> dict[str, Any]:
    """The JSON that asks for it."""
    usage = {"include_usage": True}
    if target.has_running_usage:
        usage["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": usage,
    }
    if target.is_chat:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
    # Fields that some servers refuse are sent only where they say something.
    if target.ignores_eos:
        body["ignore_eos"] = True
    if ask.priority:
        body["priority"] = ask.priority
    return {**body, **target.extra_body}


class Client:
    """Keep-alive connections to one server, as many as there are requests. Use with `async with`.

    Args:
        target: what is asked.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._url = target.url(target.endpoint)
        self._session: aiohttp.ClientSession | None = None
        self._trace = aiohttp.TraceConfig()
        self._trace.on_connection_reuseconn.append(_note_kept)

    async def __aenter__(self) -> Client:
        headers = {"Content-Type": "application/json", **self.target.headers}
        if self.target.api_key is not None:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=self.target.verifies_tls
            ),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s),
            headers=headers,
            trace_configs=[self._trace],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, ask: Ask) -> Answer:
        """Send a request now and read its answer to the end."""
        body = orjson.dumps(body_of(self.target, ask))
        sent_s = time.monotonic()
        try:
            streamed = await self._read_answer(body)
        except AnswerFault as fault:
            return Answer(sent_s, time.monotonic(), None, fault)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            return Answer(sent_s, time.monotonic(), None, fault_of(error))
        return Answer(sent_s, time.monotonic(), streamed, None)

    async def get_json(self, path: str) -> object:
        """The body of a page of the server.

        Raises:
            AnswerFault: there is none, or it is no JSON.
        """
        try:
            async with await self._request("GET", self.target.url(path)) as response:
                await _refuse_status(response)
                return orjson.loads(await response.read())
        except orjson.JSONDecodeError as error:
            raise AnswerFault(NOT_OPENAI, f"{path} is no JSON") from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise fault_of(error) from error

    async def _read_answer(self, body: bytes) -> StreamedAnswer:
        lines, reader = SseLines(), AnswerReader()
        async with await self._request("POST", self._url, body) as response:
            await _refuse_status(response)
            if response.content_type != "text/event-stream":
                raise AnswerFault(
                    NOT_OPENAI, f"the answer is {response.content_type}, not text/event-stream"
                )
            async for data in response.content.iter_any():
                now_s = time.monotonic()
                for payload in lines.push(data):
                    reader.push(payload, now_s)
        return reader.finish()

    async def _request(
        self, method: str, url: str, body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """The head of a response. What went by a kept connection that ended without any is asked
        anew: a server may close one after any request (llama.cpp does after some), and the next
        one meets that on its way.
        """
        assert self._session is not None, "the client is used outside of `async with`"
        while True:  # ends: a connection that has ended is kept no longer
            connection = _Connection()
            try:
                return await self._session.request(
                    method, url, data=body, trace_request_ctx=connection
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.was_kept:
                    raise


async def _refuse_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.content.read(MAX_ERROR_BYTES)
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = {}
    detail = error_message(body) if isinstance(body, dict) and body else repr(text[:80])
    raise AnswerFault(f"status {response.status}", detail)


def fault_of(error: Exception) -> AnswerFault:
    """The kind of what went wrong on the way."""
    if isinstance(error, asyncio.TimeoutError):
        return AnswerFault(TIMEOUT, "the answer did not end in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        is_refused = isinstance(error.os_error, ConnectionRefusedError)
        return AnswerFault(CONNECTION_REFUSED if is_refused else CANNOT_CONNECT, str(error))
    if isinstance(error, (aiohttp.InvalidURL, ssl.SSLError)):
        return AnswerFault(CANNOT_CONNECT, str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        return AnswerFault(NOT_OPENAI, f"the answer is no HTTP: {error.message}")
    return AnswerFault(BROKEN_STREAM, str(error) or type(error).__name__)
