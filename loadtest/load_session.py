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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
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
        save_period_s: how often a result that is kept is written on the way.
    """

    def __init__(
        self, settings: LoadSettings, load: Load, save_period_s: float = SAVE_PERIOD_S
    ) -> None:
        self._settings = settings
        self._save_period_s = save_period_s
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
        """Send everything, or as much as there is time for until an interrupt; the result, which
        is the caller's to keep.

        Raises:
            OSError: a file cannot be written; nothing was sent.
            MeasuresError: a metric or percentile that there is not; nothing was sent.
        """
        # What cannot be told or written afterwards is refused before.
        self._keep(self._result())
        _allow_many_connections()
        with self._log() as log:
            self._tally = LoadTally(self._settings.result.slo, log)
            async with Client(self._settings.target) as client:
                await self._warm_up(client)
                await self._run_load(client)
        return self._result()

    async def _warm_up(self, client: Client) -> None:
        await LoadRun(client, lambda _: None, self._settings.pace.max_concurrency).run(
            self._load.warmups
        )

    async def _run_load(self, client: Client) -> None:
        is_hidden = None if self._settings.result.shows_progress else True
        with _progress(self._load.num_planned, is_hidden) as bar:
            run = LoadRun(client, lambda ended: self._end(ended, bar), self._max_concurrency)
            self._start_s = time.monotonic()
            sending = asyncio.ensure_future(run.run(self._load.planned))
            with _interrupting(lambda: self._interrupt(sending)):
                async with self._saving_on_the_way():
                    await self._wait_for(sending)

    @property
    def _max_concurrency(self) -> int | None:
        return self._settings.pace.max_concurrency

    def _interrupt(self, sending: asyncio.Future[None]) -> None:
        self._is_interrupted = True
        sending.cancel()

    async def _wait_for(self, sending: asyncio.Future[None]) -> None:
        try:
            await sending
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise

    def _end(self, ended: EndedRequest, bar: Any) -> None:
        self._tally.add(ended, self._start_s)
        bar.update()
        if not bar.disable:
            bar.set_postfix(failed=self._tally.num_failed, refresh=False)

    @asynccontextmanager
    async def _saving_on_the_way(self) -> AsyncIterator[None]:
        has_ended = asyncio.Event()
        saving = asyncio.ensure_future(self._save_until(has_ended))
        try:
            yield
        finally:
            has_ended.set()
            # To its end: a write that is on its way would else replace the last result.
            await saving

    async def _save_until(self, has_ended: asyncio.Event) -> None:
        while not has_ended.is_set():
            try:
                await asyncio.wait_for(has_ended.wait(), self._save_period_s)
            except asyncio.TimeoutError:
                await self._save()

    async def _save(self) -> None:
        # In a thread: the figures of many requests take a second, and answers come meanwhile.
        tell = self._teller()
        try:
            await asyncio.to_thread(lambda: self._keep(tell()))
        except OSError as error:
            print(f"the result cannot be saved now: {error}", file=sys.stderr)

    def _result(self) -> Json:
        return self._teller()()

    def _teller(self) -> Callable[[], Json]:
        """Makes the result as it is now, wherever and whenever it is called."""
        state = RunState(self._date, self._load.num_planned, self._is_interrupted)
        tally = self._tally.snapshot(self._duration_s())
        return lambda: result_of(self._settings, tally, state)

    def _keep(self, result: Json) -> None:
        if self.result_path is not None:
            keep_result(self.result_path, result)

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


def _progress(num_requests: int, is_hidden: bool | None) -> Any:
    # None: shown where standard error is a terminal.
    return tqdm(total=num_requests, unit="req", file=sys.stderr, disable=is_hidden, smoothing=0.05)


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
