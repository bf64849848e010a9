"""What the benchmark asks: servers over HTTP, and our engine without one, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from loadtest.client import Ask, Client
from loadtest.load_run import EndedRequest, LoadRun, PlannedRequest
from loadtest.peers.launch import Launch
from loadtest.peers.process import ServerFailed, ServerProcess, current_environment
from loadtest.peers.process_tree import ProcessTree
from loadtest.target_check import TargetError, check_target

START_TIMEOUT_S = 600.0
SETTLE_S = 0.5
"""After a pause: what was due meanwhile (health checks, timers) is done before the turn."""


class Service(Protocol):
    """One of those that take turns."""

    name: str
    dtype: str
    weight_bytes: float | None
    has_token_ids: bool

    @property
    def tree(self) -> ProcessTree: ...

    def start(self) -> float:
        """Start it; seconds until it was ready.

        Raises:
            ServerFailed: it did not come up.
        """
        ...

    async def send(
        self, planned: Sequence[PlannedRequest], max_concurrency: int | None
    ) -> list[EndedRequest]:
        """Ask for all of these, and wait for their ends.

        Raises:
            ServerFailed: it is gone.
        """
        ...

    def can_take(self, workload: str) -> bool:
        """Whether it is asked this workload."""
        ...

    def pause(self) -> None:
        """Make it cost nothing until it is resumed."""
        ...

    def resume(self) -> None:
        """Make it ready to be asked."""
        ...

    def end(self) -> None:
        """End it."""
        ...


class HttpService:
    """A server that speaks OpenAI's completions.

    Args:
        name: in tables.
        launch: how it is started and asked.
        log_dir: takes the file of its output.
    """

    def __init__(self, name: str, launch: Launch, log_dir: Path) -> None:
        self.name = name
        self.dtype = launch.dtype
        self.weight_bytes = launch.weight_bytes
        self.has_token_ids = launch.has_token_ids
        self._launch = launch
        self._target = launch.target
        self._log = log_dir / f"{name}.log"
        self._server: ServerProcess | None = None

    @property
    def tree(self) -> ProcessTree:
        """Its processes."""
        return self._running().tree

    def start(self) -> float:
        """See Service. Ends with an answer of a few tokens."""
        self._server = ServerProcess(self.name, self._launch, self._log, current_environment())
        taken_s = self._server.wait_until_ready(START_TIMEOUT_S)
        try:
            checked = asyncio.run(check_target(self._target, self._target.model, Ask("Hello", 2)))
        except TargetError as error:
            raise ServerFailed(f"{self.name}: {error}\n{self._server.log_tail()}") from error
        self._target = checked.target
        return taken_s

    async def send(
        self, planned: Sequence[PlannedRequest], max_concurrency: int | None
    ) -> list[EndedRequest]:
        """See Service."""
        ended: list[EndedRequest] = []
        async with Client(self._target) as client:
            await LoadRun(client, ended.append, max_concurrency).run(planned)
        server = self._running()
        if server.has_ended:
            raise ServerFailed(f"{self.name} ended while it was asked:\n{server.log_tail()}")
        return ended

    def can_take(self, workload: str) -> bool:
        """All of them."""
        return True

    def pause(self) -> None:
        """See Service."""
        if self._launch.can_be_stopped:
            self._running().pause()

    def resume(self) -> None:
        """See Service."""
        if self._launch.can_be_stopped:
            self._running().resume()

    def end(self) -> None:
        """See Service; nothing if it was not started."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def _running(self) -> ServerProcess:
        assert self._server is not None, "the service is used before it was started"
        return self._server
