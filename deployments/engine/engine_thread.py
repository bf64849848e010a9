"""The thread that steps an engine, and the bridge between it and asyncio: the one place with
threads.

    event loop                                   engine thread
    generate() --- command: add, abort --->      drain commands, step, drain aborts, update
    TokenStream <-- one call_soon_threadsafe --  outputs of a whole step

However the thread ends, every stream ends: with its tokens, or with an error.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from deployments.engine.clock import Clock
from deployments.engine.engine import Engine
from deployments.engine.outputs import RequestOutput
from deployments.engine.token_stream import NoUsher, TokenStream, Usher
from deployments.protocol import (
    EngineStats,
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    RequestRefused,
    TokenChunk,
)

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine can serve nobody any more; says why."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Abort | _Stop


class EngineThread:
    """Steps an engine in a thread of its own, and serves its outputs to readers on one event loop.

    `start` and `stop` may be called from anywhere; the other methods belong to the event loop.

    Args:
        engine: touched by the thread alone once it is started.
        clock: the engine's.
        stuck_after_s: with work present and no step finished for so long, `check_health` fails.
        unread_after_s: a stream that nobody has read for so long is aborted: its reader has
        vanished.
    """

    def __init__(
        self, engine: Engine, clock: Clock, *, stuck_after_s: float, unread_after_s: float = 300.0
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._stuck_after_s = stuck_after_s
        self._unread_after_s = unread_after_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._pending_outputs: list[RequestOutput] = []
        self._streams: dict[str, TokenStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = None
        self._last_progress_s = clock.now()
        self._is_stopping = False
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- the event loop's side --------------------------------------------------------------------

    def start(self) -> None:
        """Let the thread run. Raises RuntimeError if it was started before."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its present step; what still runs ends with an error. May be called
        twice.

        Raises:
            TimeoutError: the thread did not end in time.
        """
        self._commands.put(_Stop())
        if self._thread.ident is None:
            self._failure = "the engine was never started"
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread did not end within {timeout_s} s")

    async def generate(
        self, request: GenerateRequest, usher: Usher | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one request as they come; what piled up while the reader was away comes as
        one chunk.

        The last chunk has a finish_reason; a refusal or a failure is a last chunk with an error,
        never an exception. Closing the generator before that aborts the request and frees its
        blocks. An usher may have what lies between the first chunk and the last one leave by
        another way.
        """
        usher = usher or NoUsher()
        stream = self._open_stream(request)
        try:
            while True:
                chunk = await stream.read()
                yield chunk
                if chunk.finish_reason is not None:
                    return
                usher.lead(stream)
        finally:
            self._close_stream(stream)
            usher.part(stream)

    def stats(self) -> EngineStats:
        """The engine's state after its last step or command."""
        return self._stats

    def check_health(self) -> None:
        """Tell whether the engine still works; never waits for it.

        Raises:
            EngineDead: its thread has ended, or it has work and has finished no step for
            `stuck_after_s`.
        """
        if self._failure is not None:
            raise EngineDead(self._failure)
        idle_s = self._clock.now() - self._last_progress_s
        if self._has_work and idle_s > self._stuck_after_s:
            raise EngineDead(f"the engine has work but finished no step for {idle_s:.0f} s")

    @property
    def _has_work(self) -> bool:
        # An answer that is complete and not yet read is its reader's work, not the engine's.
        return any(not stream.has_ended for stream in self._streams.values())

    def _open_stream(self, request: GenerateRequest) -> TokenStream:
        stream = TokenStream(request.request_id)
        self._loop = asyncio.get_running_loop()
        if request.request_id in self._streams:
            error = RequestRefused.invalid("request_id", "request id is in use").info
            stream.put(_refusal(request, error), self._clock.now())
            return stream
        if not self._has_work:
            self._last_progress_s = self._clock.now()
        self._streams[request.request_id] = stream
        self._commands.put(_Add(request))
        # Looked at after the command is queued: a thread that died before could not have answered
        # it.
        if self._failure is not None:
            error = ErrorInfo(ErrorKind.UNAVAILABLE, f"this replica has stopped: {self._failure}")
            stream.put(_refusal(request, error), self._clock.now())
        return stream

    def _close_stream(self, stream: TokenStream) -> None:
        stream.is_closed = True
        if not stream.has_ended:
            # Its id stays in use until the engine has confirmed the end, or another stream of that
            # id would get what is still on its way to this one.
            self._commands.put(_Abort(stream.request_id))
        elif self._streams.get(stream.request_id) is stream:  # not so if refused for its id
            del self._streams[stream.request_id]

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        now = self._clock.now()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.has_ended:
                continue
            stream.put(output, now)
            if stream.is_closed and stream.has_ended:
                del self._streams[output.request_id]
            elif stream.is_abandoned(now, self._unread_after_s):
                self._commands.put(_Abort(output.request_id))

    # --- the engine thread's side -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._step_until_stopped()
            self._die("the replica is shutting down", ErrorKind.UNAVAILABLE)
        except BaseException as error:  # whatever it was, no reader may be left waiting
            logger.critical("the engine thread died", exc_info=error)
            self._die(f"the engine failed: {error!r}", ErrorKind.ENGINE)

    def _step_until_stopped(self) -> None:
        engine = self._engine
        while not self._is_stopping:
            if not engine.has_requests:
                self._publish()
                self._obey(self._commands.get())
            self._drain_commands()
            hold_s = engine.find_hold_s()
            if hold_s > 0.0:
                self._publish()
                self._wait_for_command(hold_s)
            elif engine.has_requests and not self._is_stopping:
                self._pending_outputs += engine.step(self._drain_commands)
                self._last_progress_s = self._clock.now()
            self._publish()

    def _drain_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._obey(command)

    def _wait_for_command(self, timeout_s: float) -> None:
        try:
            self._obey(self._commands.get(timeout=timeout_s))
        except queue.Empty:
            return

    def _obey(self, command: _Command) -> None:
        if isinstance(command, _Stop):
            self._is_stopping = True
        elif isinstance(command, _Add):
            self._add(command.request)
        else:
            output = self._engine.abort(command.request_id)
            if output is not None:
                self._pending_outputs.append(output)

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._engine.add(request)
        except RequestRefused as refused:
            self._pending_outputs.append(_refusal(request, refused.info))

    def _publish(self) -> None:
        """Hand everything of this step to the event loop in one call."""
        self._stats = self._engine.stats()
        if self._pending_outputs:
            outputs, self._pending_outputs = self._pending_outputs, []
            self._call_loop(lambda: self._deliver(outputs))

    def _die(self, reason: str, kind: ErrorKind) -> None:
        self._failure = reason
        error = ErrorInfo(kind, reason)
        self._call_loop(lambda: self._end_all_streams(error))

    def _end_all_streams(self, error: ErrorInfo) -> None:
        self._deliver(
            [
                RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
                for request_id in list(self._streams)
            ]
        )

    def _call_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is None:
            return  # nobody has asked for anything yet
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed, and its readers with it.
            logger.info("outputs came after the event loop had closed")


def _refusal(request: GenerateRequest, error: ErrorInfo) -> RequestOutput:
    return RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error)
