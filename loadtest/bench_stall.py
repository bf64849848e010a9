"""What huge prompts do to everybody else: the worst gap of running streams, and of a tiny request.

Over `stub_app`'s service, whose steps take 20 ms: eight streams are read and /version is asked
every 50 ms, first undisturbed, then while one huge body after the other arrives. All that is seen
is the ingress: parsing, templates, tokenizing. The stub's context is shorter than the prompts, so
none of them runs.

    chunkserve bench stall --tokens 100000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from loadtest.bench_serve import free_port, running
from loadtest.http_client import Address, Connection
from loadtest.words import WORDS

NUM_STREAMS = 8
VERSION_PERIOD_S = 0.05
QUIET_S = 3.0
NUM_BODIES = 3
"""Of each kind."""
Json = dict[str, Any]


def huge_bodies(num_tokens: int) -> dict[str, tuple[str, Json]]:
    """By name: the path, and a body whose prompt is so long."""
    text = "".join(WORDS[index % len(WORDS)] for index in range(num_tokens))
    messages = [{"role": "user", "content": text[at : at + 100]} for at in range(0, len(text), 100)]
    return {
        "completion, text": ("/v1/completions", {"prompt": text}),
        "completion, ids": ("/v1/completions", {"prompt": [1000] * num_tokens}),
        "chat, one message": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}]},
        ),
        "chat, many messages": ("/v1/chat/completions", {"messages": messages}),
        "tokenize": ("/tokenize", {"prompt": text}),
        "chunk": ("/chunk", {"prompt": text}),
    }


class Gaps:
    """The longest silences since they were last taken."""

    def __init__(self) -> None:
        self.stream_s = 0.0
        self.version_s = 0.0

    def take(self) -> Json:
        """What they were, in milliseconds; from now on they are counted anew."""
        found = {
            "worst_stream_gap_ms": round(self.stream_s * 1e3),
            "worst_version_ms": round(self.version_s * 1e3),
        }
        self.stream_s = self.version_s = 0.0
        return found


async def _read_stream(address: Address, number: int, gaps: Gaps, stop: asyncio.Event) -> None:
    while not stop.is_set():
        body = {"prompt": f"Go on, {number}.", "max_tokens": 8000, "stream": True}
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(address.post(body, keep_alive=False))
        status = (await reader.readuntil(b"\r\n\r\n"))[9:12]
        if status != b"200":
            raise RuntimeError(f"a stream was answered with status {status.decode()}")
        last_s = None
        while not stop.is_set() and await reader.read(65536):
            now_s = time.monotonic()
            if last_s is not None:
                gaps.stream_s = max(gaps.stream_s, now_s - last_s)
            last_s = now_s
        writer.close()


async def _ask_version(address: Address, gaps: Gaps, stop: asyncio.Event) -> None:
    # As small as can be, and answered by the ingress alone.
    connection = Connection(replace(address, path="/version"))
    request = f"GET /version HTTP/1.1\r\nHost: {address.host}\r\n\r\n".encode()
    while not stop.is_set():
        asked_s = time.monotonic()
        await connection.ask(request)
        gaps.version_s = max(gaps.version_s, time.monotonic() - asked_s)
        await asyncio.sleep(VERSION_PERIOD_S)
    connection.close()


async def _disturb(address: Address, bodies: dict[str, tuple[str, Json]], gaps: Gaps) -> Json:
    await asyncio.sleep(QUIET_S)
    gaps.take()
    await asyncio.sleep(QUIET_S)
    found: Json = {"undisturbed": gaps.take()}
    for name, (path, body) in bodies.items():
        target = replace(address, path=path)
        connection, request = Connection(target), target.post(body)
        asked_s = time.monotonic()
        statuses = [(await connection.ask(request)).status for _ in range(NUM_BODIES)]
        taken_s = (time.monotonic() - asked_s) / NUM_BODIES
        connection.close()
        found[name] = {
            "body_kb": len(request) // 1024,
            "answered_after_ms": round(taken_s * 1e3),
            "statuses": statuses,
            **gaps.take(),
        }
    return found


async def _measure(address: Address, num_tokens: int) -> Json:
    gaps, stop = Gaps(), asyncio.Event()
    watchers: list[Awaitable[None]] = [
        _read_stream(address, number, gaps, stop) for number in range(NUM_STREAMS)
    ]
    watching = asyncio.gather(*watchers, _ask_version(address, gaps, stop))
    found = await _disturb(address, huge_bodies(num_tokens), gaps)
    stop.set()
    await watching
    return found


def run_bench(num_tokens: int) -> Json:
    """Start the service, measure, end it.

    Raises:
        RuntimeError: the service did not come up.
    """
    port = free_port()
    with running(port):
        return asyncio.run(_measure(Address("127.0.0.1", port, "/v1/completions"), num_tokens))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--tokens", type=int, default=100_000, help="of the huge prompts")


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON."""
    print(json.dumps(run_bench(arguments.tokens), indent=2))
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
