"""Many streams for a long time, a third of whose clients leave: is anything lost, doubled or kept?

The service is `stub_app`'s, so every answer's text is known. Clients read streams of random
lengths; a third of them leaves at a random moment, before the first token or later.

    every answer that was read to its end     has exactly its text, one finish_reason, [DONE]
    after the last one                        nothing runs, waits or holds blocks, no task is left
    meanwhile                                 memory, files and threads of the processes stay flat

    chunkserve bench soak --seconds 300 --streams 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.bench_serve import free_port, running
from loadtest.http_client import Address
from loadtest.words import WORDS

MAX_TOKENS = 120
SHARE_LEAVING = 1 / 3
ANSWER_TIMEOUT_S = 120.0
SAMPLE_S = 10.0
SETTLE_S = 30.0
MIN_SAMPLES = 7
MAX_GROWTH = 1.1
"""Of memory, from the first third of the samples to the last."""
IDLE_GAUGES = (
    "chunkserve_num_requests_running",
    "chunkserve_num_requests_waiting",
    "chunkserve_kv_cache_usage_perc",
    "chunkserve_ingress_requests_in_progress",
)
TASKS = "chunkserve_asyncio_tasks"
MAX_LASTING_TASKS = 12
"""Tasks that serve many requests and stay: relays, connections between processes."""
_TEXT = re.compile(rb'"text":"([^"]*)"')
Json = dict[str, Any]


@dataclass
class Tally:
    """What became of the streams."""

    num_finished: int = 0
    num_left: int = 0
    num_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)


# --- one client -----------------------------------------------------------------------------------


def find_fault(answer: bytes, num_tokens: int) -> str | None:
    """What is wrong with a whole streamed answer, or None."""
    if not answer.startswith(b"HTTP/1.1 200"):
        return f"status {answer[9:12]!r}"
    if b'"error"' in answer:
        return "error event"
    text = b"".join(_TEXT.findall(answer)).decode()
    if text != "".join(WORDS[index % len(WORDS)] for index in range(num_tokens)):
        return "wrong text"
    if answer.count(b'"finish_reason":"length"') != 1 or b"data: [DONE]" not in answer:
        return "wrong end"
    return None


async def _read_or_leave(address: Address, chance: random.Random, tally: Tally) -> None:
    num_tokens = chance.randint(1, MAX_TOKENS)
    leaves = chance.random() < SHARE_LEAVING
    prompt = f"Go on, {chance.getrandbits(40)}."
    body = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.post(body, keep_alive=False))
    patience_s = chance.uniform(0.0, MAX_TOKENS * 0.02) if leaves else ANSWER_TIMEOUT_S
    try:
        answer = await asyncio.wait_for(reader.read(-1), patience_s)
    except (TimeoutError, asyncio.TimeoutError):
        tally.num_left += leaves
        tally.faults.update([] if leaves else ["no end"])
    else:
        fault = find_fault(answer, num_tokens)
        tally.faults.update([fault] if fault else [])
        tally.num_finished += fault is None
        tally.num_tokens += num_tokens
    finally:
        writer.transport.abort()


async def _client(number: int, address: Address, until_s: float, tally: Tally) -> None:
    chance = random.Random(number)
    while time.monotonic() < until_s:
        await _read_or_leave(address, chance, tally)


# --- what the service holds -----------------------------------------------------------------------


def _processes(root: psutil.Process) -> dict[str, psutil.Process]:
    found = {}
    for process in root.children(recursive=True):
        title = " ".join(process.cmdline()[:1])
        if title.startswith("ray::ServeReplica:ours:"):
            found[title.split()[0].rsplit(":", 1)[-1]] = process
    return found


def _sample(processes: dict[str, psutil.Process]) -> Json:
    return {
        name: {
            "rss_mb": process.memory_info().rss >> 20,
            "num_fds": process.num_fds(),
            "num_threads": process.num_threads(),
        }
        for name, process in processes.items()
    }


async def _watch(processes: dict[str, psutil.Process], until_s: float) -> list[Json]:
    samples = []
    while time.monotonic() < until_s:
        samples.append(_sample(processes))
        await asyncio.sleep(min(SAMPLE_S, max(0.0, until_s - time.monotonic())))
    return samples


def _gauges(address: Address, names: Collection[str]) -> dict[str, float]:
    url = f"http://{address.host}:{address.port}/metrics"
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        family.name: sum(sample.value for sample in family.samples)
        for family in families
        if family.name in names
    }


def _settled(address: Address) -> dict[str, float]:
    """The gauges once nothing runs, or as they are after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while any((gauges := _gauges(address, IDLE_GAUGES)).values()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return gauges


def find_growth(samples: list[Json]) -> list[str]:
    """The processes whose memory grew from the first third of the samples to the last; of a run too
    short to tell, none. The first sample is from before the load, and counts for nothing.
    """
    if len(samples) < MIN_SAMPLES:
        return []
    third = (len(samples) - 1) // 3
    first, last = samples[1 : 1 + third], samples[-third:]

    # Not the peak: that of the first connections would hide what is added later.
    def usual(name: str, part: list[Json]) -> float:
        return float(statistics.median(sample[name]["rss_mb"] for sample in part))

    return [name for name in samples[0] if usual(name, last) > MAX_GROWTH * usual(name, first)]


# --- the whole ------------------------------------------------------------------------------------


async def _load(
    address: Address, processes: dict[str, psutil.Process], seconds: float, num_streams: int
) -> tuple[Tally, list[Json]]:
    tally, until_s = Tally(), time.monotonic() + seconds
    clients = [_client(number, address, until_s, tally) for number in range(num_streams)]
    watching = asyncio.ensure_future(_watch(processes, until_s))
    await asyncio.gather(watching, *clients)
    return tally, watching.result()


def run_soak(seconds: float, num_streams: int) -> Json:
    """Start the service, load it, look at what is left, end it; `is_clean` is the verdict.

    Raises:
        RuntimeError: the service did not come up.
    """
    port = free_port()
    address = Address("127.0.0.1", port, "/v1/completions")
    with running(port) as root:
        processes = _processes(root)
        tasks_before = _gauges(address, [TASKS])[TASKS]
        tally, samples = asyncio.run(_load(address, processes, seconds, num_streams))
        gauges = _settled(address)
        after = _sample(processes)
        tasks_after = _gauges(address, [TASKS])[TASKS]
    grown = find_growth(samples)
    is_at_rest = len(gauges) == len(IDLE_GAUGES) and not any(gauges.values())
    has_leaked_tasks = tasks_after > tasks_before + MAX_LASTING_TASKS
    return {
        "seconds": seconds,
        "num_streams": num_streams,
        "num_finished": tally.num_finished,
        "num_left": tally.num_left,
        "num_tokens_of_finished": tally.num_tokens,
        "faults": dict(tally.faults),
        "gauges_after": gauges,
        "num_tasks_before_and_after": [tasks_before, tasks_after],
        "grown": grown,
        "samples": [*samples, after],
        "is_clean": is_at_rest and not (tally.faults or grown or has_leaked_tasks),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=200, help="read at once")


def main(arguments: argparse.Namespace) -> int:
    """Run it and print what was found as JSON; 1 if anything was."""
    result = run_soak(arguments.seconds, arguments.streams)
    print(json.dumps(result, indent=2))
    return 0 if result["is_clean"] else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
