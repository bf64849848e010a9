"""The paths of the service: which takes and gives what.

Owns parsing of bodies and the documentation of each route. What they do is `Frontend`'s.
"""

from __future__ import annotations

import importlib.metadata
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import ValidationError

from deployments.protocol import EngineStats
from serve_app.answer_models import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    ModelAnswer,
    ModelList,
    StatusAnswer,
    VersionAnswer,
)
from serve_app.api_base import ApiModel
from serve_app.api_models import CompletionRequest
from serve_app.chat_models import ChatCompletionRequest
from serve_app.chunker import ChunkResponse
from serve_app.errors import ApiError, from_validation
from serve_app.frontend import Frontend
from serve_app.off_loop import run_sized
from serve_app.openapi import document, faults, streamed, takes
from serve_app.served_model import ServedModel
from serve_app.text_models import (
    ChunkRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

Body = TypeVar("Body", bound=ApiModel)

MAX_PARSED_INLINE = 64 * 1024
"""Bytes of a body: a larger one takes long enough for the streams beside it to notice."""


async def parse(request: Request, kind: type[Body]) -> Body:
    """The body of a request, whatever its Content-Type: curl's default is wrong for JSON.

    Raises:
        ApiError: 400, naming the field and what to change; 415, the body is compressed.
    """
    _refuse_encoded(request)
    content = await request.body()
    try:
        return await run_sized(
            len(content), lambda: kind.model_validate_json(content), MAX_PARSED_INLINE
        )
    except ValidationError as error:
        raise from_validation(error.errors()) from error


def _refuse_encoded(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {encoding[:40]!r} is not read; send the body uncompressed."
        raise ApiError(415, message, code="unsupported_encoding")


def add_routes(api: FastAPI, front: Frontend) -> None:
    """All routes of the service, documented."""
    _add_generation_routes(api, front)
    _add_text_routes(api, front)
    _add_model_routes(api, front)
    _add_state_routes(api, front)
    bodies = (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)
    answers = (CompletionAnswer, CompletionChunk, ChatAnswer, ChatChunk)
    document(api, (*bodies, ChunkRequest, *answers))


def _add_generation_routes(api: FastAPI, front: Frontend) -> None:
    errors = faults(400, 401, 404, 408, 413, 415, 429, 500, 503)

    @api.post(
        "/v1/completions",
        responses=streamed(CompletionAnswer, CompletionChunk) | errors,
        openapi_extra=takes(CompletionRequest),
    )
    async def completions(request: Request) -> Response:
        return await front.complete(request, await parse(request, CompletionRequest))

    @api.post(
        "/v1/chat/completions",
        responses=streamed(ChatAnswer, ChatChunk) | errors,
        openapi_extra=takes(ChatCompletionRequest),
    )
    async def chat_completions(request: Request) -> Response:
        return await front.chat(request, await parse(request, ChatCompletionRequest))


def _add_text_routes(api: FastAPI, front: Frontend) -> None:
    errors = faults(400, 401, 404, 413, 415, 500, 503)

    @api.post("/tokenize", responses=errors, openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> TokenizeResponse:
        return await front.tokenize(await parse(request, TokenizeRequest))

    @api.post("/detokenize", responses=errors, openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeResponse:
        return await front.detokenize(await parse(request, DetokenizeRequest))

    @api.post("/chunk", responses=errors, openapi_extra=takes(ChunkRequest))
    async def chunk(request: Request) -> ChunkResponse:
        return await front.chunks(await parse(request, ChunkRequest))


def _add_model_routes(api: FastAPI, front: Frontend) -> None:
    def describe(model: ServedModel) -> ModelAnswer:
        return ModelAnswer(
            id=model.card.name,
            object="model",
            created=front.started_at,
            owned_by="chunkserve",
            max_model_len=model.card.max_model_len,
        )

    @api.get("/v1/models", responses=faults(401, 500, 503))
    async def models() -> ModelList:
        return ModelList(object="list", data=[describe(await front.model())])

    @api.get("/v1/models/{model_id:path}", responses=faults(401, 404, 500, 503))
    async def model(model_id: str) -> ModelAnswer:
        served = await front.model()
        served.check_name(model_id)
        return describe(served)


def _add_state_routes(api: FastAPI, front: Frontend) -> None:
    @api.get("/health", responses=faults(500, 503))
    async def health() -> StatusAnswer:
        await front.backend.check_health()
        return StatusAnswer(status="ok")

    @api.get("/ready", responses=faults(500, 503))
    async def ready() -> StatusAnswer:
        await front.backend.check_health()
        await front.model()
        return StatusAnswer(status="ok")

    @api.get("/metrics", response_class=PlainTextResponse, responses=faults(401, 500))
    async def metrics() -> Response:
        return await front.metrics()

    @api.get("/version", responses=faults(401))
    async def version() -> VersionAnswer:
        return VersionAnswer(version=_version())

    @api.get("/stats", responses=faults(401, 500, 503))
    async def stats() -> list[EngineStats]:
        return await front.backend.stats()


def _version() -> str:
    try:
        return importlib.metadata.version("chunkserve")
    except importlib.metadata.PackageNotFoundError:
        # Run from its sources, without being installed.
        return "unknown"
