"""The OpenAPI page: what the routes take and give, although bodies are read and written by hand.

Owns how a route is documented. Bodies are parsed strictly from JSON by the routes themselves, so
their models are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.answer_models import ErrorAnswer
from serve_app.api_base import ApiModel

OPENAPI_URL = "/openapi.json"
_REF = "#/components/schemas/{model}"

REQUEST_FAULTS: dict[int, str] = {
    400: "The request cannot be served as it is; the message says what to change.",
    401: "The API key is missing or not valid.",
    404: "The model is not served.",
    408: "The request's own `timeout` passed before its answer began.",
    413: "The body is larger than the service takes.",
    415: "The body is compressed.",
    429: "A rate is reached; `Retry-After` says when to try again.",
}
SERVICE_FAULTS: dict[int, str] = {
    500: "The service failed while it held the request.",
    503: "The service is full or no replica can serve now; `Retry-After` says when to try again.",
}


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route for these statuses."""
    told = REQUEST_FAULTS | SERVICE_FAULTS
    return {
        status: {"content": _json(ErrorAnswer), "description": told[status]}
        | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})
        for status in statuses
    }


_RETRY_AFTER = {"Retry-After": {"description": "In seconds.", "schema": {"type": "integer"}}}


def takes(body: type[ApiModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route with this body."""
    return {"requestBody": {"required": True, "content": _json(body)}}


def streamed(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route whose answer is whole or a stream of events."""
    events = f"`data:` lines, each with a {chunk.__name__} or an ErrorAnswer; then `data: [DONE]`"
    streams = {"text/event-stream": {"schema": {"type": "string", "description": events}}}
    return {200: {"content": _json(whole) | streams, "description": "The answer."}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    # By reference: FastAPI would build a validator for each route and status, and use none.
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def document(api: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Let the page of `api` show these models, which no route names in its signature; errors are
    shown always.
    """
    generate = api.openapi

    def openapi() -> dict[str, Any]:
        is_fresh = api.openapi_schema is None
        schema = generate()
        if is_fresh:
            modes = [(model, "validation") for model in (*models, ErrorAnswer)]
            _, definitions = models_json_schema(modes, ref_template=_REF)  # type: ignore[arg-type]
            known = schema.setdefault("components", {}).setdefault("schemas", {})
            for name, definition in definitions["$defs"].items():
                known.setdefault(name, definition)
        return schema

    api.openapi = openapi  # type: ignore[method-assign]
