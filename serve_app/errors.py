"""Typed errors and what a client sees of them: an HTTP status and the OpenAI error body.

Owns the mapping both ways. Does not decide what is an error; a client never sees a stack trace.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from deployments.protocol import ErrorInfo, ErrorKind, RequestRefused

CLIENT_CLOSED_REQUEST = 499
"""Status for the log alone: the client had gone, nobody reads it."""


class ApiError(Exception):
    """An answer that is an error: `status` for HTTP, the rest for the OpenAI error body.

    `retry_after_s` is set where the same request may succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's word for whose fault it is."""
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return "service_unavailable"
        if self.status == HTTPStatus.REQUEST_TIMEOUT:
            return "timeout"
        return (
            "server_error"
            if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            else "invalid_request_error"
        )

    def body(self) -> dict[str, Any]:
        """The OpenAI error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


class BackendUnavailable(Exception):
    """No replica of the pool can serve now; the message says why."""


class ClientDisconnected(Exception):
    """The client left before its answer; there is nobody to answer."""


def from_info(info: ErrorInfo) -> ApiError:
    """The answer for an error that travelled as data."""
    match info.kind:
        case ErrorKind.INVALID:
            return ApiError(400, info.message, info.param)
        case ErrorKind.CONTEXT_LENGTH:
            return ApiError(400, info.message, info.param, "context_length_exceeded")
        case ErrorKind.OVERLOADED:
            return ApiError(503, info.message, info.param, "overloaded", retry_after_s=1)
        case ErrorKind.UNAVAILABLE:
            return ApiError(503, info.message, info.param, "unavailable", retry_after_s=1)
        case ErrorKind.ENGINE:
            return ApiError(500, info.message, info.param, "engine_error")
        case ErrorKind.TIMEOUT:
            return ApiError(408, info.message, info.param, "timeout")


def in_client_words(info: ErrorInfo, names: Mapping[str, str]) -> ErrorInfo:
    """The same error under the name by which the client knows the field it concerns."""
    if info.param is None or info.param not in names:
        return info
    name = names[info.param]
    message = info.message
    if message.startswith(info.param):
        message = name + message.removeprefix(info.param)
    return ErrorInfo(info.kind, message, name)


def model_not_found(asked: str, served: str) -> ApiError:
    """The answer when a client names a model that is not the served one."""
    shown = asked if len(asked) <= 200 else asked[:200] + "…"
    message = f"The model '{shown}' does not exist; this service serves '{served}'."
    return ApiError(404, message, "model", "model_not_found")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The answer for the errors of a pydantic validation: names the first bad field and all that is
    wrong with it.
    """
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestRefused):
        return from_info(cause.info)
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"The body is not valid JSON in UTF-8: {why}")
    if not first["loc"]:
        return ApiError(400, f"The body must be a JSON object. {_message(first)}")
    field = first["loc"][0]
    # A field of several allowed types fails once for each; say all of them.
    faults = [_message(error) for error in errors if error["loc"][:1] == (field,)]
    return ApiError(
        400, f"{_path(first['loc'])}: {'; or '.join(dict.fromkeys(faults))}", str(field)
    )


def _message(error: Any) -> str:
    message: str = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("missing", "value_error"):
        return message
    shown = _JsonRepr().repr(error["input"])
    return f"{message} (got {shown if len(shown) <= 80 else shown[:80] + '…'})"


class _JsonRepr(reprlib.Repr):
    """Bounded, and in the client's words: null rather than None."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802  (reprlib's naming)
        """As in JSON."""
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        """As in JSON."""
        return "true" if value else "false"


def _path(loc: Sequence[int | str]) -> str:
    # Parts such as 'list[int]' name a branch of a union, not a part of the request.
    return ".".join(
        str(part) for part in loc if isinstance(part, int) or part.isidentifier() and part != "str"
    )


OnError = Callable[[Scope, "ApiError"], None]
"""Told of every request that is answered with an error."""


def unobserved(_scope: Scope, _error: ApiError) -> None:
    """Nobody is told."""


def install_error_handlers(api: FastAPI, on_error: OnError = unobserved) -> None:
    """Give every way a request can fail the OpenAI error body, and tell `on_error` of it."""

    def answer(request: Request, error: ApiError) -> JSONResponse:
        on_error(request.scope, error)
        return error.response()

    @api.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @api.exception_handler(RequestRefused)
    async def on_refused(request: Request, error: RequestRefused) -> Response:
        return answer(request, from_info(error.info))

    @api.exception_handler(BackendUnavailable)
    async def on_unavailable(request: Request, error: BackendUnavailable) -> Response:
        return answer(request, from_info(ErrorInfo(ErrorKind.UNAVAILABLE, str(error))))

    @api.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, from_validation(error.errors()))

    @api.exception_handler(ClientDisconnected)
    async def on_disconnect(_request: Request, _error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @api.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        response = answer(request, _from_http(request, error))
        # Such as Allow, which says which methods there are.
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(Exception)
    async def on_fault(request: Request, _error: Exception) -> Response:
        # Starlette re-raises after this answer, so the server logs the trace; logging here would
        # double it.
        message = "The service failed to handle this request."
        return answer(request, ApiError(500, message, code="internal_error"))


def _from_http(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"There is no route {request.url.path}.", code="not_found")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}."
        return ApiError(405, message, code="method_not_allowed")
    return ApiError(error.status_code, str(error.detail))
