"""What our HTTP service costs beside a bare Serve application of the same shape, without a model.

Both run on one Serve (`stub_app`), under the settings of `chunkserve serve`. Windows of load take
turns (bare, ours, bare, ours, ...), since other work on the machine comes and goes; what counts is
the ratio within a run.

    requests    short prompts, one output token, answers not streamed: requests/s of both
    streams     every stream gets a token each 20 ms: CPU time of the service's processes per token

CPU time is of the whole process tree, the load client left out. `net` leaves out what the tree
takes while idle; `serving` counts the proxy and the application's own processes alone.

    chunkserve bench serve --rounds 3 --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from loadtest.http_client import Address, Answer, Connection

START_TIMEOUT_S = 180.0
REQUEST = {"prompt": "Say something about the weather of today.", "max_tokens": 1}
STEPS_PER_S = 50
APPS = {"bare": "/bare/v1/completions", "ours": "/v1/completions"}
Json = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure. `num_streams` read at once, `num_connections` ask at once."""

    num_rounds: int
    window_s: float
    num_connections: int
    num_streams: int
    stream_interval_s: float


# --- the service ----------------------------------------------------------------------------------


def _service_config(port: int, stream_interval_s: float) -> Json:
    args = {
        "scheduler": {"max_num_seqs": 256},
        "pool": {
            "num_cpus": 0,
            "graceful_shutdown_timeout_s": 5,
            "stream_interval_s": stream_interval_s,
        },
        "ingress": {"num_cpus": 0},
    }
    names = {"ours": ("/", "build_app"), "bare": ("/bare", "build_bare")}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": name,
                "route_prefix": prefix,
                "import_path": f"loadtest.stub_app:{function}",
                "args": args,
            }
            for name, (prefix, function) in names.items()
        ],
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(port: int, stream_interval_s: float = 0.0) -> Iterator[psutil.Process]:
    """Both applications, ready to be asked; ended with the block.

    Raises:
        RuntimeError: they did not come up; holds the end of their log.
    """
    with tempfile.TemporaryDirectory(prefix="chunkserve-bench-") as folder:
        config, log = Path(folder, "serve.yaml"), Path(folder, "log")
        config.write_text(yaml.safe_dump(_service_config(port, stream_interval_s)))
        command = [sys.executable, "-m", "loadtest.stub_app", str(config)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, log)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while b"ready: " not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the applications did not come up:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


# --- CPU time -------------------------------------------------------------------------------------


def _cpu_s(root: psutil.Process) -> Counter[str]:
    """CPU seconds so far of each kind of process in the tree."""
    seconds: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            seconds[_kind(process)] += times.user + times.system
        except psutil.Error:  # it ended meanwhile
            continue
    return seconds


def _kind(process: psutil.Process) -> str:
    title = " ".join(process.cmdline()[:1])
    if title.startswith("ray::ServeReplica:"):
        return title.split()[0].removeprefix("ray::ServeReplica:")
    if title.startswith("ray::Proxy") or "haproxy" in process.name():
        return "proxy"
    return "ray"


def _used_s(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """A kind whose processes ended meanwhile used nothing that can be told."""
    return {kind: max(0.0, after[kind] - before[kind]) for kind in after}


# --- load -----------------------------------------------------------------------------------------


async def _ask_for(connection: Connection, request: bytes, until_s: float) -> int:
    num_answers = 0
    while time.monotonic() < until_s:
        answer = await connection.ask(request)
        if answer.status != 200:
            raise RuntimeError(f"a request was answered with status {answer.status}")
        num_answers += 1
    return num_answers


async def _answers_in_window(address: Address, settings: BenchSettings) -> int:
    request = address.post(REQUEST)
    connections = [Connection(address) for _ in range(settings.num_connections)]
    until_s = time.monotonic() + settings.window_s
    counts = await asyncio.gather(*(_ask_for(one, request, until_s) for one in connections))
    for connection in connections:
        connection.close()
    return sum(counts)


async def _stream(address: Address, num_tokens: int, num_streams: int) -> list[Answer]:
    request = address.post(
        {"prompt": "Go on.", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    )
    connections = [Connection(address) for _ in range(num_streams)]
    answers = await asyncio.gather(*(one.ask(request) for one in connections))
    for connection in connections:
        connection.close()
    return answers


# --- measurements ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall time of something, and what each kind of process used meanwhile, in seconds."""

    taken_s: float
    used_s: Mapping[str, float]

    def serving_s(self, name: str) -> dict[str, float]:
        """CPU time of the proxy and of an application's own processes."""
        kinds = (f"{name}:", "proxy")
        return {kind: used for kind, used in self.used_s.items() if kind.startswith(kinds)}


class Meter:
    """Measures a process tree while something runs."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root

    def run(self, work: Callable[[], Result]) -> tuple[Result, Cost]:
        """What `work` returned, and what it cost."""
        before, started_s = _cpu_s(self._root), time.monotonic()
        result = work()
        taken_s = time.monotonic() - started_s
        return result, Cost(taken_s, _used_s(before, _cpu_s(self._root)))


def _measure_requests(
    meter: Meter, addresses: Mapping[str, Address], settings: BenchSettings
) -> Json:
    def window(name: str) -> Json:
        count, cost = meter.run(lambda: asyncio.run(_answers_in_window(addresses[name], settings)))
        serving = {kind: used * 1e6 / count for kind, used in cost.serving_s(name).items()}
        return {
            "requests_per_s": round(count / cost.taken_s, 1),
            "cpu_us_per_request_serving": round(sum(serving.values())),
            "of_which": {kind: round(used_us) for kind, used_us in serving.items()},
        }

    for name in addresses:  # once uncounted: the first requests ask for the model and its tokenizer
        window(name)
    windows: dict[str, list[Json]] = {name: [] for name in addresses}
    for _ in range(settings.num_rounds):
        for name in addresses:
            windows[name].append(window(name))
    pairs = list(zip(windows["ours"], windows["bare"], strict=True))
    ratios = [ours["requests_per_s"] / bare["requests_per_s"] for ours, bare in pairs]
    cpu = "cpu_us_per_request_serving"
    return {
        **windows,
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(bare[cpu] / ours[cpu] for ours, bare in pairs), 3),
    }


def _measure_streams(meter: Meter, name: str, address: Address, settings: BenchSettings) -> Json:
    num_tokens = max(2, round(settings.window_s * STEPS_PER_S))
    _, idle = meter.run(lambda: time.sleep(settings.window_s))
    answers, cost = meter.run(
        lambda: asyncio.run(_stream(address, num_tokens, settings.num_streams))
    )
    bad = [answer.status for answer in answers if answer.status != 200]
    if bad:
        raise RuntimeError(f"streams were answered with status {bad}")
    total = settings.num_streams * num_tokens
    idle_s = sum(idle.used_s.values()) * cost.taken_s / idle.taken_s

    def per_token(seconds: float) -> float:
        return round(seconds * 1e6 / total, 1)

    serving = cost.serving_s(name)
    return {
        "tokens_per_s": round(total / cost.taken_s),
        "events_per_token": round(sum(a.num_events for a in answers) / total, 3),
        "cpu_us_per_token": per_token(sum(cost.used_s.values())),
        "cpu_us_per_token_net": per_token(sum(cost.used_s.values()) - idle_s),
        "cpu_us_per_token_serving": per_token(sum(serving.values())),
        "of_which": {kind: per_token(seconds) for kind, seconds in serving.items()},
    }


def run_bench(settings: BenchSettings) -> Json:
    """Start both applications, measure, end them.

    Raises:
        RuntimeError: they did not come up, or refused a request.
    """
    port = free_port()
    addresses = {name: Address("127.0.0.1", port, path) for name, path in APPS.items()}
    with running(port, settings.stream_interval_s) as root:
        meter = Meter(root)
        requests = _measure_requests(meter, addresses, settings)
        streams: dict[str, list[Json]] = {name: [] for name in addresses}
        for _ in range(settings.num_rounds):
            for name, address in addresses.items():
                streams[name].append(_measure_streams(meter, name, address, settings))
        return {"requests": requests, "streams": streams}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement, interleaved")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument("--connections", type=int, default=16, help="that ask at once")
    parser.add_argument("--streams", type=int, default=64, help="that are read at once")
    parser.add_argument(
        "--stream-interval", type=float, default=0.0, help="ours: pool.stream_interval_s"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON."""
    settings = BenchSettings(
        num_rounds=arguments.rounds,
        window_s=arguments.seconds,
        num_connections=arguments.connections,
        num_streams=arguments.streams,
        stream_interval_s=arguments.stream_interval,
    )
    print(json.dumps(run_bench(settings), indent=2))
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
