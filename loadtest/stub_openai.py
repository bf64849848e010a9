"""A server that speaks OpenAI's completions and chats and costs as little as it can.

It says the same word as often as it is asked to, one event a token, each in a write of its own, as
fast as the reader takes them. `bench ceiling` measures the client against it; run it by hand to
try a load without a model. Its HTTP is what that client speaks: keep-alive, bodies with a length.

    python -m loadtest.stub_openai --port 8001
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson

STUB_MODEL = "stub"
EVENTS_PER_TURN = 16
"""Written for one reader before the others have their turn."""
_MODELS = orjson.dumps({"object": "list", "data": [{"id": STUB_MODEL}]})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(is_chat: bool, finish_reason: str | None) -> bytes:
    text = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
    # As long as a real server's events are.
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1700000000,
        "model": STUB_MODEL,
        "choices": [{"index": 0, **text, "finish_reason": finish_reason}],
        "usage": None,
    }
    return _chunk(b"data: " + orjson.dumps(body) + b"\n\n")


_TOKENS = {is_chat: _event(is_chat, None) for is_chat in (False, True)}
_LAST_TOKENS = {is_chat: _event(is_chat, "length") for is_chat in (False, True)}


def _end(num_tokens: int) -> bytes:
    usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
    end = b"data: " + orjson.dumps(usage) + b"\n\ndata: [DONE]\n\n"
    return _chunk(end) + b"0\r\n\r\n"


class StubConnection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None
        self._is_paused = False
        self._is_chat = False
        self._num_asked = 0
        self._num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._transport = None

    def pause_writing(self) -> None:
        """It reads slower than this writes."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._is_paused = False
        self._write_tokens()

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._received += data
        head, has_head, body = self._received.partition(b"\r\n\r\n")
        if not has_head:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if len(body) < int(length.split(b"\r\n", 1)[0] or 0):
            return
        self._received = b""
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"GET"):
            page = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            self._transport.write(page % len(_MODELS) + _MODELS)
            return
        self._is_chat = b"/chat/completions" in head.split(b"\r\n", 1)[0]
        self._num_asked = self._num_left = int(orjson.loads(body).get("max_tokens", 16))
        self._transport.write(_STREAM_HEAD)
        self._write_tokens()

    def _write_tokens(self) -> None:
        for _ in range(EVENTS_PER_TURN):
            if self._transport is None or self._is_paused or not self._num_left:
                return
            self._num_left -= 1
            if self._num_left:
                self._transport.write(_TOKENS[self._is_chat])
            else:
                self._transport.write(_LAST_TOKENS[self._is_chat] + _end(self._num_asked))
        asyncio.get_running_loop().call_soon(self._write_tokens)


async def serve(port: int) -> None:
    """Serve until cancelled."""
    server = await asyncio.get_running_loop().create_server(StubConnection, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8001)
    try:
        asyncio.run(serve(parser.parse_args().port))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
