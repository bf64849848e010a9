"""The process of one server: started, waited for, stopped while others are measured, ended.

    start ─► wait_until_ready ─► [ pause ─► resume ]* ─► end

Does not know what the server does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from loadtest.peers.launch import HealthPage, Launch
from loadtest.peers.process_tree import ProcessTree

POLL_S = 0.2
END_TIMEOUT_S = 30.0
LOG_TAIL = 1500
PROBE_TIMEOUT_S = 2.0


class ServerFailed(RuntimeError):
    """A server did not come up; holds the end of its log."""


class ServerProcess:
    """One server and all processes below it.

    Args:
        name: for messages.
        launch: what is started.
        log: takes its output.
        environment: that `launch` adds to.
    """

    def __init__(
        self, name: str, launch: Launch, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._launch = launch
        self._log = log
        self._started_s = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **launch.env},
                # Ctrl-C ends the benchmark, and the benchmark ends the server.
                start_new_session=True,
            )
        self.tree = ProcessTree(self._process.pid)

    def wait_until_ready(self, timeout_s: float) -> float:
        """Wait until it says that it can be asked; the seconds since its start.

        Raises:
            ServerFailed: it ended, or said nothing in time.
        """
        deadline_s = self._started_s + timeout_s
        while not self._is_ready():
            if self.has_ended:
                raise ServerFailed(f"{self.name} ended while starting:\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise ServerFailed(
                    f"{self.name} was not ready after {timeout_s:g} s:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)
        return time.monotonic() - self._started_s

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def pause(self) -> None:
        """Stop it, so that it takes no processor time at all."""
        self.tree.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.tree.send(signal.SIGCONT)

    def end(self) -> None:
        """End it and all that it started, kindly first; at once when this is interrupted."""
        self.resume()
        self._process.send_signal(signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        finally:
            self.tree.send(signal.SIGKILL)
            self._process.wait()

    def log_tail(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]

    def _is_ready(self) -> bool:
        ready = self._launch.ready
        if isinstance(ready, HealthPage):
            return answers_200(self._launch.target.base_url + ready.path)
        return ready.words.encode() in self._log.read_bytes()


def answers_200(url: str) -> bool:
    """Whether a page is there now."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def current_environment() -> dict[str, str]:
    """That of this process, for the processes it starts."""
    return dict(os.environ)
