"""One pool of engine replicas, over its Serve handle.

Owns what Ray's failures mean to a request. Handles stream by gRPC (`_by_reference=False`): a
quarter of the CPU of object references. Streams are closed and cancelled explicitly, each within
the other: implicit cancellation loses some in abort storms.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.config import ServiceConfig
from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    ModelCard,
    ReplicaMetrics,
    Seat,
    TokenChunk,
    TokenRun,
)
from serve_app.broadcast import ask_each
from serve_app.errors import BackendUnavailable
from serve_app.handle_call import StreamingCall, begin_call, end_call
from serve_app.metrics import PoolMetrics
from serve_app.prompt_hashes import with_block_hashes
from serve_app.quiet_log import QuietLog
from serve_app.relay_reader import RelayReader
from serve_app.token_mailbox import TokenMailbox, TokensLost

logger = logging.getLogger(__name__)

MAX_RETRIES = 1
"""Of a request whose replica died before it sent anything."""
CONTROL_TIMEOUT_S = 5.0
"""For questions to all replicas (health, stats)."""
METRICS_TIMEOUT_S = 2.0
"""A replica that is slower is left out of the page."""
PROBE_S = 2.0
"""How often it is looked whether there is a replica, while requests wait for their first token."""


@dataclass
class PoolCounters:
    """What happened to requests on their way, since this process started."""

    num_retries: int = 0
    """Times a request went to another replica, unseen by its client."""
    num_lost: int = 0
    """Requests that ended with an error because their replica did."""
    num_refused: int = 0
    """Requests that found the pool full or without a replica."""


class _NoReplica(Exception):
    """The pool has had no running replica for too long."""


def _failed(request: GenerateRequest, kind: ErrorKind, message: str) -> TokenChunk:
    return TokenChunk(
        request.request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo(kind, message)
    )


def _says_it_is_gone(chunk: TokenChunk) -> bool:
    """Whether a first chunk says that this replica serves nobody, and another may be asked."""
    return chunk.error is not None and chunk.error.kind is ErrorKind.UNAVAILABLE


class RayPool:
    """The replicas behind a handle.

    Args:
        name: what an error calls it.
        handle: of the engine deployment.
        config: that of the pool.
    """

    def __init__(self, name: str, handle: DeploymentHandle[Any], config: ServiceConfig) -> None:
        self.name = name
        self.counters = PoolCounters()
        self._handle = handle
        self._block_size = config.cache.block_size
        self._is_hashed = config.pool.routing.policy == "prefix" and (
            config.cache.enable_prefix_caching and config.pool.max_replicas > 1
        )
        self._no_replica_timeout_s = config.pool.no_replica_timeout_s
        # Kept, because options() costs more than the call.
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        # By reference: a tokenizer's files exceed what one gRPC message may hold.
        self._card = handle.options(method_name="model_card", _by_reference=True)
        relay = handle.options(method_name="relay", stream=True, _by_reference=False)
        self._relays = RelayReader(
            lambda opening: cast(StreamingCall[list[TokenRun]], relay.remote(opening))
        )
        # Serve's own router cannot be told which replica a call is for.
        self._can_relay = config.pool.routing.policy == "prefix"
        self._readings: set[asyncio.Future[None]] = set()
        self._log = QuietLog(logger)
        self._probed_s = -PROBE_S
        self._has_replica = True
        self._probing = asyncio.Lock()

    async def model_card(self) -> ModelCard:
        """What the pool serves; waits for a first replica to be up.

        Raises:
            BackendUnavailable: no replica can say.
        """
        try:
            card: ModelCard = await self._card.remote()
        except (RayError, RayServeException) as error:
            raise BackendUnavailable(
                f"no replica could describe its model: {brief(error)}"
            ) from error
        return card

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `backend.Backend`."""
        if self._is_hashed:
            request = await with_block_hashes(request, self._block_size)
        try:
            async with aclosing(self._generate_with_retries(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BackPressureError:
            yield self._refused(request, ErrorKind.OVERLOADED, "is full now; try again later")
        except (DeploymentUnavailableError, _NoReplica):
            yield self._refused(request, ErrorKind.UNAVAILABLE, "has no running replica now")
        except (RayActorError, TokensLost) as error:
            yield self._lost(request, brief(error))

    def _lost(self, request: GenerateRequest, why: str) -> TokenChunk:
        self.counters.num_lost += 1
        self._log.warning(f"request {request.request_id} lost its replica: {why}")
        return _failed(request, ErrorKind.ENGINE, "the replica that served this request was lost")

    def _refused(self, request: GenerateRequest, kind: ErrorKind, message: str) -> TokenChunk:
        self.counters.num_refused += 1
        self._log.warning(f"request {request.request_id}: {self.name} {message}")
        return _failed(request, kind, f"{self.name} {message}")

    async def _generate_with_retries(
        self, request: GenerateRequest
    ) -> AsyncGenerator[TokenChunk, None]:
        for num_retries in range(MAX_RETRIES + 1):
            can_retry = num_retries < MAX_RETRIES
            has_begun = has_ended = False
            try:
                async with aclosing(self._stream(request)) as chunks:
                    async for chunk in chunks:
                        if not has_begun and can_retry and _says_it_is_gone(chunk):
                            reason = chunk.error.message if chunk.error else ""
                            break
                        has_begun = True
                        has_ended = chunk.finish_reason is not None
                        yield chunk
                    else:
                        if not has_ended:
                            yield self._lost(request, "its stream ended before its answer")
                        return
            except RayActorError as error:
                # Once a token has left, another replica could not go on from it; before, nobody saw
                # anything.
                if has_begun or not can_retry:
                    raise
                reason = brief(error)
            self.counters.num_retries += 1
            self._log.warning(f"request {request.request_id} goes to another replica: {reason}")

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        mailbox = TokenMailbox(request.request_id)
        seat = self._relays.sit(mailbox)
        has_ended = False
        try:
            call = begin_call(lambda: self._generate.remote(request, seat))
            reading = asyncio.ensure_future(self._fill(mailbox, call, seat))
            self._readings.add(reading)
            reading.add_done_callback(self._readings.discard)
            try:
                await self._until_begun(mailbox)
                async for chunk in mailbox:
                    has_ended = chunk.finish_reason is not None
                    yield chunk
            finally:
                # A call that has ended by itself would raise its error once more.
                if not has_ended and not reading.done():
                    reading.cancel()
                    await asyncio.wait({reading})
        finally:
            self._relays.leave(seat)

    async def _fill(self, mailbox: TokenMailbox, call: Any, seat: Seat) -> None:
        """Read a call's stream to its end, which is after the last chunk. Cancelling this ends the
        call.
        """
        try:
            # A streaming handle returns a generator, which its type does not tell.
            async for chunk in cast(DeploymentResponseGenerator[TokenChunk], call):
                if chunk.replica and self._can_relay:
                    self._relays.ride(seat, chunk.replica)
                mailbox.put(chunk)
        except asyncio.CancelledError:
            await end_call(call)
            raise
        except Exception as error:
            mailbox.fail(error)
        else:
            mailbox.end()

    async def _until_begun(self, mailbox: TokenMailbox) -> None:
        """Wait for the first chunk, however long it takes while there is a replica that may send
        it.
        """
        missing_since_s = None
        while not await mailbox.has_arrived(PROBE_S):
            if await self._probe():
                missing_since_s = None
            elif missing_since_s is None:
                missing_since_s = time.monotonic()
            elif time.monotonic() - missing_since_s >= self._no_replica_timeout_s:
                raise _NoReplica

    async def _probe(self) -> bool:
        """Whether a replica is running, asked once for all requests that wait."""
        async with self._probing:
            if time.monotonic() - self._probed_s >= PROBE_S:
                self._has_replica = self._handle.running_replicas_populated() and (
                    await self._can_be_asked()
                )
                self._probed_s = time.monotonic()
            return self._has_replica

    async def _can_be_asked(self) -> bool:
        try:
            await self.ask_all("stats")
        except BackendUnavailable:
            return False
        return True

    async def check_health(self) -> None:
        """Healthy if at least one replica is.

        Raises:
            BackendUnavailable: none is; says why.
        """
        answers = await self.ask_all("check_health")
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(faults) == len(answers):
            why = brief(faults[0]) if faults else "no replica is running yet"
            raise BackendUnavailable(f"{self.name}: {why}")

    async def ask_all(self, method: str) -> list[Any]:
        """What each running replica answers, or the exception it ended with; TimeoutError for one
        that is silent, which keeps no answer of another back.

        Raises:
            BackendUnavailable: there is no replica to ask.
        """
        try:
            return await ask_each(self._handle, method, CONTROL_TIMEOUT_S)
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as error:
            raise BackendUnavailable(
                f"{self.name}: the replicas could not be asked: {brief(error)}"
            ) from error

    async def metrics(self) -> PoolMetrics:
        """See MetricsSource."""
        try:
            answers = await ask_each(self._handle, "metrics", METRICS_TIMEOUT_S)
        except DeploymentUnavailableError:
            return PoolMetrics((), 0)
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as error:
            self._log.warning(f"{self.name}: no replica told its metrics: {brief(error)}")
            return PoolMetrics((), 1)
        pages = tuple(answer for answer in answers if isinstance(answer, ReplicaMetrics))
        for answer in answers:
            if isinstance(answer, BaseException):
                self._log.warning(f"{self.name}: a replica is not on the page: {brief(answer)}")
        return PoolMetrics(pages, len(answers) - len(pages))


def brief(error: BaseException) -> str:
    """An error in one line; Ray's own texts carry a remote stack trace, which belongs in a log
    alone.
    """
    cause = getattr(error, "cause", None)
    source = cause if isinstance(cause, BaseException) else error
    lines = str(source).strip().splitlines()
    return lines[-1] if lines else type(source).__name__
