"""How tests start and look at the service of stub_app: two pools that work and one that cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from conftest import REPOSITORY, Service

CHAT, BATCH, BROKEN = 0, 1, 2
NUM_REPLICAS = 3


def stub_config(folder: Path, port: int) -> Path:
    """A Serve config: pool chat of two replicas, batch of one, and broken, which fails to load."""
    few = {"num_cpus": 0, "health_check_period_s": 1, "graceful_shutdown_timeout_s": 5}
    args = {
        "cache": {"block_size": 4},
        "scheduler": {"chunk_size": 64, "max_num_seqs": 32},
        "pool": few,
        "pools": {
            "chat": {"priorities": [CHAT], "num_replicas": 2, "routing": {"stats_period_s": 1}},
            "batch": {"priorities": [BATCH]},
            "broken": {"priorities": [BROKEN], "execution": {"num_threads": 13}},
        },
        "ingress": {"num_cpus": 0, "num_replicas": 2},
    }
    application = {
        "name": "chunkserve",
        "route_prefix": "/",
        "import_path": "stub_app:build_app",
        "args": args,
        "deployments": [{"name": "ingress", "health_check_period_s": 1}],
    }
    http = {"host": "127.0.0.1", "port": port}
    config = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
    path = folder / "stub.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def stub_modules() -> Iterator[None]:
    """Let the processes of Ray find stub_app and what it is made of."""
    tests = REPOSITORY / "tests"
    paths = [REPOSITORY, tests, tests / "unit", tests / "serve"]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ":".join(map(str, paths))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def replica_stats(service: Service) -> list[dict[str, Any]]:
    """Of every replica that answers; empty when none does."""
    try:
        answer = httpx.get(f"{service.url}/stats", timeout=10)
    except httpx.HTTPError:
        return []
    return list(answer.json()) if answer.status_code == 200 else []


def is_idle(service: Service) -> bool:
    """Whether all replicas are there, nothing runs, and every block is free."""
    replicas = replica_stats(service)
    return len(replicas) == NUM_REPLICAS and all(
        r["num_running"] == r["num_waiting"] == 0 and r["num_free_blocks"] == r["num_blocks"]
        for r in replicas
    )


def replica_pids(service: Service, deployment: str) -> list[int]:
    """The processes of a deployment's replicas."""
    name = f"ray::ServeReplica:chunkserve:{deployment}"
    below = psutil.Process(service.process.pid).children(recursive=True)
    return [child.pid for child in below if title_of(child).startswith(name)]


def title_of(process: psutil.Process) -> str:
    """Its command line; nothing for one that has just ended."""
    try:
        return "".join(process.cmdline())
    except psutil.Error:
        return ""
