"""A real Ray Serve with the small real model, started as a user would; one for the whole
session.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until a condition holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout_s} s: {what}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Service:
    """A running service and where it answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def stats(self) -> dict[str, int]:
        """Of the one replica."""
        (replica,) = httpx.get(f"{self.url}/stats", timeout=10).json()
        return dict(replica)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every block is free."""
        stats = self.stats()
        no_requests = stats["num_running"] == 0 and stats["num_waiting"] == 0
        return no_requests and stats["num_free_blocks"] == stats["num_blocks"]

    def is_up(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"the service ended while it started:\n{self.log.read_text()[-4000:]}")
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def small_config(folder: Path, port: int) -> Path:
    """configs/local.yaml with a port of its own, one thread, and a pool that tests can fill."""
    config = yaml.safe_load((REPOSITORY / "configs/local.yaml").read_text())
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args["cache"]["num_blocks"] = 300
    args["scheduler"]["max_num_seqs"] = 16
    args["execution"] = {"num_threads": 1}
    args["pool"] = {"num_cpus": 0, "graceful_shutdown_timeout_s": 60}
    args["ingress"] = {"num_cpus": 0}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def started(command: Sequence[str], port: int, folder: Path) -> Iterator[Service]:
    """A service started by `command`, ended however the test ends."""
    log = folder / "service.log"
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    environment.pop("RAY_ADDRESS", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    service = Service(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until(service.is_up, START_TIMEOUT_S, "the service is up")
        yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def command(name: str) -> str:
    """The path of a console command of this environment."""
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("serve")
    port = free_port()
    config = small_config(folder, port)
    with started([command("serve"), "run", str(config)], port, folder) as running:
        yield running
