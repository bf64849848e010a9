"""Our engine alone as one of the services: asked through a pipe, without HTTP or Ray."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from deployments.config import ServiceConfig
from loadtest.client import Answer
from loadtest.load_run import EndedRequest, PlannedRequest
from loadtest.peers.process import END_TIMEOUT_S, LOG_TAIL, ServerFailed
from loadtest.peers.process_tree import ProcessTree
from loadtest.stream_reader import StreamedAnswer, TokenCount

NAME = "engine alone"
WORKLOADS = ("W1", "W5", "W6", "W6chunk")
"""Those without times of their own and without a shared prefix."""


class EngineService:
    """The engine of a service's config in a process of its own.

    Args:
        config: of the service it is compared with.
        dtype: of its weights, for people.
        weight_bytes: that one decode step reads.
        log_dir: takes the file of its output.
    """

    name = NAME
    has_token_ids = True

    def __init__(
        self, config: ServiceConfig, dtype: str, weight_bytes: float | None, log_dir: Path
    ) -> None:
        self.dtype = dtype
        self.weight_bytes = weight_bytes
        self._config = config
        self._log = log_dir / "engine_alone.log"
        self._process: subprocess.Popen[str] | None = None
        self._tree: ProcessTree | None = None

    @property
    def tree(self) -> ProcessTree:
        """Its process."""
        assert self._tree is not None, "the engine is used before it was started"
        return self._tree

    def start(self) -> float:
        """See Service."""
        started_s = time.monotonic()
        command = [sys.executable, "-m", "loadtest.peers.engine_child"]
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, self._config.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._tree = ProcessTree(self._process.pid)
        self._read()
        return time.monotonic() - started_s

    async def send(
        self, planned: Sequence[PlannedRequest], max_concurrency: int | None
    ) -> list[EndedRequest]:
        """See Service. Times of sending are those of the engine's process: the pipe is no part of
        what is measured.
        """
        asked = {
            "requests": [(list(each.ask.prompt), each.ask.max_tokens) for each in planned],
            "max_concurrency": max_concurrency,
        }
        times = await asyncio.to_thread(self._ask, asked)
        return [_ended(each, *spent) for each, spent in zip(planned, times, strict=True)]

    def can_take(self, workload: str) -> bool:
        """See WORKLOADS."""
        return workload in WORKLOADS

    def pause(self) -> None:
        """Nothing: it waits for a line."""

    def resume(self) -> None:
        """See `pause`."""

    def end(self) -> None:
        """See Service; nothing if it was not started."""
        if self._process is None:
            return
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _ask(self, asked: dict[str, Any]) -> list[tuple[float, list[float]]]:
        assert self._process is not None, "the engine is used before it was started"
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(asked) + "\n")
        pipe.flush()
        return [(sent_s, token_s) for sent_s, token_s in self._read()["requests"]]

    def _read(self) -> dict[str, Any]:
        assert self._process is not None, "the engine is used before it was started"
        line = self._pipe(self._process.stdout).readline()
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            raise ServerFailed(f"{NAME} ended:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "the process was started with pipes"
        return pipe


def _ended(planned: PlannedRequest, sent_s: float, token_times_s: list[float]) -> EndedRequest:
    streamed = StreamedAnswer(token_times_s, TokenCount.USAGE, planned.num_prompt_tokens, 0)
    return EndedRequest(planned, sent_s, Answer(sent_s, token_times_s[-1], streamed, None))
