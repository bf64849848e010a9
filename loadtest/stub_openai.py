"""A server that speaks OpenAI's completions and chats and costs as little as it can.

It says the same word as often as it is asked to, one event a token, each in a write of its own, as
fast as the reader takes them. `bench ceiling` measures the client against it; run it by hand to
try a load without a model.

    python -m loadtest.stub_openai --port 8001
"""

from __future__ import annotations

import argparse
import sys

import orjson
from aiohttp import web

STUB_MODEL = "stub"
_END = b"data: [DONE]\n\n"


def _event(is_chat: bool, finish_reason: str | None) -> bytes:
    text = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
    choice = {"index": 0, **text, "finish_reason": finish_reason}
    # As long as a real server's events are.
    chunk = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1700000000,
        "model": STUB_MODEL,
        "choices": [choice],
        "usage": None,
    }
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


async def _list_models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": STUB_MODEL}]})


async def _complete(request: web.Request) -> web.StreamResponse:
    num_tokens = int(orjson.loads(await request.read()).get("max_tokens", 16))
    is_chat = request.path.endswith("/chat/completions")
    event = _event(is_chat, None)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(num_tokens - 1):
        await response.write(event)
    await response.write(_event(is_chat, "length"))
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}}
    await response.write(b"data: " + orjson.dumps(usage) + b"\n\n")
    await response.write(_END)
    return response


def make_app() -> web.Application:
    """The server's routes."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", _list_models)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/chat/completions", _complete)
    return app


def main() -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8001)
    port = parser.parse_args().port
    web.run_app(make_app(), host="127.0.0.1", port=port, print=None, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
