"""Starts `chunkserve serve` for a benchmark, with some settings changed, and ends it.

Owns the process and its config file. Speaks to it over HTTP alone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deployments.config import read_yaml
from loadtest.bench_serve import free_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL = 2000
READY = b"ready: "


class ServiceFailed(RuntimeError):
    """The service did not come up; holds the end of its log."""


def changed_config(path: Path, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The Serve config of a file, with sections of its only application changed.

    Args:
        path: a config like `configs/local.yaml`.
        changes: by section of the service tree, the keys to set.

    Raises:
        ConfigError: the file is missing or is no YAML.
        ValueError: the file has no application, or several.
    """
    data = read_yaml(path)
    applications = data.get("applications") if isinstance(data, dict) else None
    if not isinstance(applications, list) or len(applications) != 1:
        raise ValueError(f"{path} must have exactly one application, as configs/local.yaml has")
    args = dict(applications[0].get("args") or {})
    for section, keys in changes.items():
        args[section] = {**(args.get(section) or {}), **keys}
    return {**data, "applications": [{**applications[0], "args": args}]}


@contextmanager
def local_service(config: Mapping[str, Any]) -> Iterator[str]:
    """The service, ready; ended with the block. Gives its base URL.

    Raises:
        ServiceFailed: it did not come up.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="chunkserve-bench-") as folder:
        file, log = Path(folder, "serve.yaml"), Path(folder, "log")
        file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        command = [sys.executable, "-m", "serve_app.cli", "serve", str(file), "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    # Its own word, not the first good answer: its proxy may start anew before that.
    while READY not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline_s:
            tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            raise ServiceFailed(f"the service did not come up:\n{tail}")
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
