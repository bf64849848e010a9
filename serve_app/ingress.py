"""The HTTP routes over a backend: parse -> prepare -> route -> stream.

`make_api` is free of Ray, so the same application runs in tests, under uvicorn and as a Serve
deployment. Every request's generator is closed explicitly whichever way it ends: finished, failed,
stopped or abandoned.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from deployments.config import ServiceConfig
from deployments.protocol import EngineStats, GenerateRequest, ModelCard, RequestRefused, TokenChunk
from serve_app.answers import AnswerHead, AnswerShape, ChatShape, CompletionShape, events
from serve_app.api_models import (
    ApiModel,
    ChatCompletionRequest,
    ChunkRequest,
    CompletionRequest,
    GenerationRequest,
)
from serve_app.asgi import EventStream, RequestIdMiddleware, until_disconnect
from serve_app.chunker import Chunker, ChunkResponse, describe_chunks
from serve_app.errors import from_info, from_validation, install_error_handlers
from serve_app.intake import PreparedRequest, ServedModel, prepare_chat, prepare_completion
from serve_app.streaming import TextDelta, TextStream, collect
from serve_app.tokenization import IncrementalDetokenizer

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=ApiModel)


class Backend(Protocol):
    """Where token ids go and come from: a pool of replicas, or a script in a test."""

    async def model_card(self) -> ModelCard:
        """What the pool serves.

        Raises:
            BackendUnavailable: no replica can say.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Continue a prompt. Never raises for a request's sake: an error is the last chunk. Closing
        it aborts.
        """
        ...

    async def stats(self) -> list[EngineStats]:
        """The state of each replica.

        Raises:
            BackendUnavailable: a replica cannot say.
        """
        ...

    async def check_health(self) -> None:
        """Return if a request could be served now.

        Raises:
            BackendUnavailable: no replica can serve; says why.
        """
        ...


class Frontend:
    """What the routes share: the backend, the chunker, and the model, asked for once.

    Args:
        backend: serves token ids.
        config: how prompts are cut.
    """

    def __init__(self, backend: Backend, config: ServiceConfig) -> None:
        self.backend = backend
        self.started_at = int(time.time())
        self._chunker = Chunker(config.scheduler)
        self._model: ServedModel | None = None
        self._model_lock = asyncio.Lock()

    async def model(self) -> ServedModel:
        """The served model.

        Raises:
            BackendUnavailable: no replica can say yet; the next call asks again.
        """
        async with self._model_lock:
            if self._model is None:
                card = await self.backend.model_card()
                self._model = await asyncio.to_thread(ServedModel.from_card, card)
            return self._model

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """POST /v1/completions."""
        model = await self.model()
        prepared = await prepare_completion(model, body)
        shape = CompletionShape(model.tokenizer, body.num_logprobs is not None)
        return await self._answer(
            request, prepared, shape, self._head("cmpl", model, prepared, body)
        )

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        """POST /v1/chat/completions."""
        model = await self.model()
        prepared = await prepare_chat(model, body)
        shape = ChatShape(model.tokenizer, body.num_logprobs is not None)
        return await self._answer(
            request, prepared, shape, self._head("chatcmpl", model, prepared, body)
        )

    async def chunks(self, body: ChunkRequest) -> ChunkResponse:
        """POST /chunk."""
        model = await self.model()
        return await asyncio.to_thread(self._chunks, model, body)

    def _chunks(self, model: ServedModel, body: ChunkRequest) -> ChunkResponse:
        encoded = model.tokenizer.encode_with_offsets(body.prompt)
        if not encoded.token_ids:
            raise RequestRefused.invalid(
                "prompt", "prompt is empty: it must hold at least one token"
            )
        spans = self._chunker.plan(len(encoded.token_ids), body.chunk_size, body.overlap_ratio)
        return describe_chunks(body.prompt, encoded, spans)

    def _head(
        self, prefix: str, model: ServedModel, prepared: PreparedRequest, body: GenerationRequest
    ) -> AnswerHead:
        return AnswerHead(
            answer_id=f"{prefix}-{prepared.generate.request_id}",
            model=model.card.name,
            created=int(time.time()),
            num_prompt_tokens=prepared.num_prompt_tokens,
            is_streamed=bool(body.stream),
            includes_usage=body.includes_usage,
        )

    async def _answer(
        self, request: Request, prepared: PreparedRequest, shape: AnswerShape, head: AnswerHead
    ) -> Response:
        deltas = self._deltas(await self.model(), prepared)
        if not head.is_streamed:
            answer = await until_disconnect(request, collect(deltas))
            _raise_error(answer)
            return JSONResponse(shape.whole(head, answer))
        # Awaited before the response starts, so that a refusal is a real HTTP status in a stream,
        # too.
        first = await until_disconnect(request, _first(deltas))
        return EventStream(events(shape, head, _resumed(first, deltas)), deltas)

    def _deltas(
        self, model: ServedModel, prepared: PreparedRequest
    ) -> AsyncGenerator[TextDelta, None]:
        tokens = self.backend.generate(prepared.generate)
        detokenizer = IncrementalDetokenizer(model.tokenizer, prepared.generate.prompt_token_ids)
        min_tokens = prepared.generate.sampling_params.min_tokens
        return TextStream(tokens, detokenizer, prepared.stops, min_tokens).deltas()


def _raise_error(delta: TextDelta) -> None:
    if delta.error is not None:
        raise from_info(delta.error)


async def _first(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    delta = await anext(deltas)
    if delta.error is not None:
        await deltas.aclose()
    _raise_error(delta)
    return delta


async def _resumed(
    first: TextDelta, deltas: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[TextDelta, None]:
    yield first
    async for delta in deltas:
        yield delta


async def _parse(request: Request, kind: type[Body]) -> Body:
    """The body of a request, whatever its Content-Type: curl's default is wrong for JSON.

    Raises:
        ApiError: 400, naming the field and what to change.
    """
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation(error.errors()) from error


def make_api(backend: Backend, config: ServiceConfig) -> FastAPI:
    """The service's HTTP application over any backend. Works with and without its lifespan being
    run.
    """
    api = make_routes(backend, config)
    api.add_middleware(RequestIdMiddleware)
    return api


def make_routes(backend: Backend, config: ServiceConfig) -> FastAPI:
    """`make_api` for a server that echoes X-Request-Id by itself, as Serve does."""
    front = Frontend(backend, config)
    # No generated documentation: bodies are parsed by hand (strictly, from JSON), so it would show
    # none of them.
    api = FastAPI(title="chunkserve", lifespan=_lifespan(front), openapi_url=None)
    install_error_handlers(api)
    _add_generation_routes(api, front)
    _add_state_routes(api, front)
    return api


def _lifespan(front: Frontend) -> Any:
    @asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncIterator[None]:
        # In the background: the pool may still be loading, and the first request asks again anyway.
        asking = asyncio.ensure_future(front.model())
        asking.add_done_callback(_log_failure)
        yield
        asking.cancel()

    return lifespan


def _log_failure(asking: asyncio.Future[ServedModel]) -> None:
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logger.warning(
            "the model could not be asked for at start; requests will ask again: %s", error
        )


def _add_generation_routes(api: FastAPI, front: Frontend) -> None:
    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await front.complete(request, await _parse(request, CompletionRequest))

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await front.chat(request, await _parse(request, ChatCompletionRequest))

    @api.post("/chunk")
    async def chunk(request: Request) -> ChunkResponse:
        return await front.chunks(await _parse(request, ChunkRequest))


def _add_state_routes(api: FastAPI, front: Frontend) -> None:
    def describe(model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.card.name,
            "object": "model",
            "created": front.started_at,
            "owned_by": "chunkserve",
            "max_model_len": model.card.max_model_len,
        }

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(await front.model())]}

    @api.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        served = await front.model()
        served.check_name(model_id)
        return describe(served)

    @api.get("/health")
    async def health() -> dict[str, str]:
        await front.backend.check_health()
        return {"status": "ok"}

    @api.get("/stats")
    async def stats() -> list[dict[str, Any]]:
        return [dataclasses.asdict(replica) for replica in await front.backend.stats()]


class Ingress:
    """The ingress deployment: HTTP in front of pools of replicas. Serve asks it for its
    application.

    Args:
        engines: handles of the pools, by name.
        config: the service's configuration.
    """

    def __init__(self, engines: dict[str, Any], config: ServiceConfig) -> None:
        # Here, so that this module stays free of Ray.
        from serve_app.pools import Pools

        self._backend = Pools.over_handles(engines, config)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once in every replica."""
        return make_routes(self._backend, self._config)
