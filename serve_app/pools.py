"""A pool of engine replicas as a backend, over its Serve handle.

Owns what Ray's failures mean to a request. Handles stream by gRPC (`_by_reference=False`): a
quarter of the CPU of object references. Streams are closed and cancelled explicitly, each within
the other: implicit cancellation loses some in abort storms.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.protocol import (
    EngineStats,
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    ModelCard,
    TokenChunk,
)
from serve_app.errors import BackendUnavailable

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
"""Of a request whose replica died before it sent anything."""
CONTROL_TIMEOUT_S = 5.0
"""For questions to all replicas (health, stats)."""


def _failed(request: GenerateRequest, kind: ErrorKind, message: str) -> TokenChunk:
    return TokenChunk(
        request.request_id, finish_reason=FinishReason.ERROR, error=ErrorInfo(kind, message)
    )


def _is_elsewhere_better(chunk: TokenChunk, num_retries: int) -> bool:
    """Whether a first chunk says that this replica serves nobody, and another may be asked."""
    gone = chunk.error is not None and chunk.error.kind is ErrorKind.UNAVAILABLE
    return gone and num_retries < MAX_RETRIES


class RayBackend:
    """The replicas behind a handle. See `ingress.Backend`.

    Args:
        handle: of the engine deployment.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        # Kept, because options() costs more than the call.
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        # By reference: a tokenizer's files exceed what one gRPC message may hold.
        self._card = handle.options(method_name="model_card", _by_reference=True)

    async def model_card(self) -> ModelCard:
        """See Backend; waits for a first replica to be up."""
        try:
            card: ModelCard = await self._card.remote()
        except (RayError, RayServeException) as error:
            raise BackendUnavailable(
                f"no replica could describe its model: {_brief(error)}"
            ) from error
        return card

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend."""
        try:
            async with aclosing(self._generate_with_retries(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BackPressureError:
            yield _failed(request, ErrorKind.OVERLOADED, "the service is full now; try again later")
        except DeploymentUnavailableError:
            yield _failed(
                request, ErrorKind.UNAVAILABLE, "no replica of the model is available now"
            )
        except RayActorError as error:
            logger.warning("request %s lost its replica: %s", request.request_id, _brief(error))
            yield _failed(
                request, ErrorKind.ENGINE, "the replica that served this request was lost"
            )

    async def _generate_with_retries(
        self, request: GenerateRequest
    ) -> AsyncGenerator[TokenChunk, None]:
        for num_retries in range(MAX_RETRIES + 1):
            has_begun = False
            try:
                async with aclosing(self._stream(request)) as chunks:
                    async for chunk in chunks:
                        if not has_begun and _is_elsewhere_better(chunk, num_retries):
                            break
                        has_begun = True
                        yield chunk
                    else:
                        return
            except RayActorError as error:
                # Once a token has left, another replica could not go on from it; before, nobody saw
                # anything.
                if has_begun or num_retries == MAX_RETRIES:
                    raise
                logger.info(
                    "request %s goes to another replica: %s", request.request_id, _brief(error)
                )

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        # A streaming handle returns a generator, which its type does not tell.
        stream = cast(DeploymentResponseGenerator[TokenChunk], self._generate.remote(request))
        is_done = False
        try:
            async for chunk in stream:
                yield chunk
            is_done = True
        except (RayError, RayServeException):
            # It ended by itself; and cancel() would raise the same error once more.
            is_done = True
            raise
        finally:
            if not is_done:
                stream.cancel()  # type: ignore[no-untyped-call]

    async def stats(self) -> list[EngineStats]:
        """See Backend."""
        answers = await self._ask_all("stats")
        for answer in answers:
            if isinstance(answer, BaseException):
                raise BackendUnavailable(
                    f"a replica could not report: {_brief(answer)}"
                ) from answer
        return answers

    async def check_health(self) -> None:
        """See Backend: healthy if at least one replica is."""
        answers = await self._ask_all("check_health")
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(faults) == len(answers):
            raise BackendUnavailable(_brief(faults[0]) if faults else "no replica is running yet")

    async def _ask_all(self, method: str) -> list[Any]:
        try:
            answers: list[Any] = await self._handle.broadcast(method).results_async(
                timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            raise BackendUnavailable(f"the replicas could not be asked: {_brief(error)}") from error
        return answers


def _brief(error: BaseException) -> str:
    """An error in one line; Ray's own texts carry a remote stack trace, which belongs in a log
    alone.
    """
    cause = getattr(error, "cause", None)
    source = cause if isinstance(cause, BaseException) else error
    lines = str(source).strip().splitlines()
    return lines[-1] if lines else type(source).__name__
