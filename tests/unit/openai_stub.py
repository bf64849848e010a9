"""A tiny OpenAI-compatible server on a free port whose answers a test writes itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from threading import Thread
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODEL = "stub-model"


def sse(*events: dict[str, Any] | str) -> bytes:
    """The events as they go over the wire."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(f"data: {text}\n\n".encode() for text in texts)


def completion_events(num_tokens: int, num_prompt_tokens: int = 4) -> list[dict[str, Any] | str]:
    """A good streamed completion."""
    events: list[dict[str, Any] | str] = [
        {
            "choices": [{"index": 0, "text": "a", "finish_reason": None}],
            "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": number},
        }
        for number in range(1, num_tokens + 1)
    ]
    return [*events, {"choices": [{"text": "", "finish_reason": "length"}]}, "[DONE]"]


async def answer_events(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """Stream the parts, each in a write of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


async def complete(request: web.Request) -> web.StreamResponse:
    """As many tokens as were asked for, one event each."""
    body = await request.json()
    return await answer_events(request, *map(sse, completion_events(body["max_tokens"])))


async def list_models(_: web.Request) -> web.StreamResponse:
    """One model."""
    return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})


@asynccontextmanager
async def serving(
    complete: Handler = complete, models: Handler = list_models
) -> AsyncIterator[str]:
    """Serve until left; gives the base URL."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@contextmanager
def serving_in_thread(complete: Handler = complete, models: Handler = list_models) -> Iterator[str]:
    """The same beside a caller that runs a loop of its own, such as a command."""
    started: Future[str] = Future()
    left = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(complete, models) as url:
            started.set_result(url)
            await left.wait()

    thread = Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.result(timeout=10.0)
    finally:
        loop.call_soon_threadsafe(left.set)
        thread.join()
        loop.close()
