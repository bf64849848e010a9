"""Runs a load from the first warm-up to the kept result: progress, interruption, saving on the way.

Ctrl-C, or SIGTERM, ends the load and keeps what has ended so far; a result that is saved is also
written every minute, so that a run of hours loses a minute at most to whatever ends it.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from loadtest.client import Client
from loadtest.load_arguments import LoadSettings
from loadtest.load_result import Json, RunState, file_name, result_of
from loadtest.load_run import EndedRequest, LoadRun, PlannedRequest
from loadtest.load_tally import LoadTally
from loadtest.provenance import keep_result, timestamp

SAVE_PERIOD_S = 60.0
MAX_OPEN_FILES = 65536


@dataclass(frozen=True, slots=True)
class Load:
    """What a session sends.

    Args:
        planned: the requests, made as they become due.
        num_planned: how many they are.
        warmups: requests before them, which count for nothing.
    """

    planned: Iterable[PlannedRequest]
    num_planned: int
    warmups: Iterable[PlannedRequest] = ()


class LoadSession:
    """One run of a load.

    Args:
        settings: of it, with the target that was checked.
        load: what is sent.
    """

    def __init__(self, settings: LoadSettings, load: Load) -> None:
        self._settings = settings
        self._load = load
        self._date = timestamp()
        self._start_s = 0.0
        self._is_interrupted = False
        self._tally = LoadTally(settings.result.slo)

    @property
    def result_path(self) -> Path | None:
        """Where the result is kept; None: nowhere."""
        result = self._settings.result
        return result.directory / file_name(self._settings, self._date) if result.is_saved else None

    async def run(self) -> Json:
        """Send everything, or as much as there is time for until an interrupt; the result.

        Raises:
            OSError: the result cannot be written.
            MeasuresError: a metric or percentile that there is not; nothing was sent.
        """
        # What cannot be told or written afterwards is refused before.
        self._save()
        _allow_many_connections()
        with self._log() as log:
            self._tally = LoadTally(self._settings.result.slo, log)
            async with Client(self._settings.target) as client:
                await self._warm_up(client)
                await self._run_load(client)
        return self._save()

    async def _warm_up(self, client: Client) -> None:
        await LoadRun(client, lambda _: None, self._settings.pace.max_concurrency).run(
            self._load.warmups
        )

    async def _run_load(self, client: Client) -> None:
        with _progress(self._load.num_planned) as bar:
            run = LoadRun(client, lambda ended: self._end(ended, bar), self._max_concurrency)
            self._start_s = time.monotonic()
            sending = asyncio.ensure_future(run.run(self._load.planned))
            saving = asyncio.ensure_future(self._save_on_the_way())
            with _interrupting(lambda: self._interrupt(sending)):
                try:
                    await sending
                except asyncio.CancelledError:
                    if not self._is_interrupted:
                        raise
                finally:
                    saving.cancel()

    @property
    def _max_concurrency(self) -> int | None:
        return self._settings.pace.max_concurrency

    def _interrupt(self, sending: asyncio.Future[None]) -> None:
        self._is_interrupted = True
        sending.cancel()

    def _end(self, ended: EndedRequest, bar: Any) -> None:
        self._tally.add(ended, self._start_s)
        bar.update()
        if not bar.disable:
            bar.set_postfix(failed=self._tally.num_failed, refresh=False)

    async def _save_on_the_way(self) -> None:
        while self.result_path is not None:
            await asyncio.sleep(SAVE_PERIOD_S)
            self._save()

    def _save(self) -> Json:
        state = RunState(
            self._date, self._load.num_planned, self._duration_s(), self._is_interrupted
        )
        result = result_of(self._settings, self._tally, state)
        if self.result_path is not None:
            keep_result(self.result_path, result)
        return result

    def _duration_s(self) -> float:
        # What was cut off by an interrupt has no end.
        if self._is_interrupted:
            return time.monotonic() - self._start_s
        return self._tally.last_end_s

    @contextmanager
    def _log(self) -> Iterator[IO[bytes] | None]:
        if self.result_path is None or not self._settings.result.is_detailed:
            yield None
            return
        with open(self.result_path.with_suffix(".jsonl"), "wb") as log:
            yield log


def _progress(num_requests: int) -> Any:
    # None: shown where standard error is a terminal.
    return tqdm(total=num_requests, unit="req", file=sys.stderr, disable=None, smoothing=0.05)


@contextmanager
def _interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call it at the first SIGINT or SIGTERM; a second one ends the process as ever."""
    loop = asyncio.get_running_loop()

    def once(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, once, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _allow_many_connections() -> None:
    """Let this process open more files than by default: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
