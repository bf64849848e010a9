"""How much can the load client receive? Its own ceiling, against a server that costs little.

The stub runs in a process of its own. What a run measures of a server means something only well
below these figures, on the same machine.

    requests    closed loop, answers of one token: requests/s
    tokens      closed loop, long answers, an event a token: tokens/s

Whose ceiling it is, the CPU time tells: the client's if its process was busy all the time
(`client_cpu_share` near 1). Below, the stub or other work on the machine set it, the figures are
lower bounds, and the CPU time per request and token says what a whole core would receive.

    chunkserve bench ceiling --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.bench_serve import free_port
from loadtest.client import Ask, Client, Target
from loadtest.load_run import LoadRun, PlannedRequest
from loadtest.load_tally import LoadTally
from loadtest.measures import Slo
from loadtest.provenance import keep_result, origin
from loadtest.stub_openai import STUB_MODEL
from loadtest.target_check import TargetError, check_target

START_TIMEOUT_S = 20.0
PROMPT = "word " * 200
TOKENS_PER_ANSWER = 500
Json = dict[str, Any]


@contextmanager
def running_stub() -> Iterator[str]:
    """The stub server in a process of its own; gives its base URL.

    Raises:
        RuntimeError: it did not come up.
    """
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.stub_openai", "--port", str(port)],
        stderr=subprocess.PIPE,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_wait_until_ready(process, url))
        yield url
    finally:
        process.terminate()
        process.communicate()


async def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None:
        try:
            await check_target(Target(url, "/v1/completions", STUB_MODEL), None, Ask("hi", 1))
            return
        except TargetError:
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the stub server did not come up in {START_TIMEOUT_S} s"
                ) from None
            await asyncio.sleep(0.05)
    _, log = process.communicate()
    raise RuntimeError(f"the stub server ended: {log.decode()[-500:]}")


def _asks(max_tokens: int, until_s: float) -> Iterator[PlannedRequest]:
    while time.monotonic() < until_s:
        yield PlannedRequest(Ask(PROMPT, max_tokens), 200, None)


async def _measure(target: Target, seconds: float, num_streams: int, max_tokens: int) -> Json:
    tally = LoadTally(Slo(None, None, None, None))
    async with Client(target) as client:
        run = LoadRun(client, lambda ended: tally.add(ended, run.start_s), num_streams)
        cpu_s, start_s = time.process_time(), time.monotonic()
        await run.run(_asks(max_tokens, start_s + seconds))
        taken_s = time.monotonic() - start_s
        cpu_s = time.process_time() - cpu_s
    return {
        "requests_per_s": round(tally.num_ended / taken_s, 1),
        "tokens_per_s": round(tally.num_output_tokens / taken_s),
        "failed": tally.num_failed,
        "client_cpu_share": round(cpu_s / taken_s, 2),
        "client_cpu_us_per_request": round(cpu_s / tally.num_ended * 1e6),
        "client_cpu_us_per_token": round(cpu_s / tally.num_output_tokens * 1e6, 1),
    }


def run_bench(seconds: float, num_streams: int) -> Json:
    """Start the stub, load it, end it.

    Raises:
        RuntimeError: the stub did not come up.
    """
    with running_stub() as url:
        target = Target(url, "/v1/completions", STUB_MODEL)
        return {
            **origin(),
            "num_streams": num_streams,
            "requests": asyncio.run(_measure(target, seconds, num_streams, 1)),
            "tokens": asyncio.run(_measure(target, seconds, num_streams, TOKENS_PER_ANSWER)),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of the two loads")
    parser.add_argument("--streams", type=int, default=64, help="in flight at once")
    parser.add_argument("--save-result", type=Path, help="write the result to this file as well")


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON."""
    result = run_bench(arguments.seconds, arguments.streams)
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
