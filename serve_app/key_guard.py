"""The guard before every route: no valid API key, no answer.

Plain ASGI, so that streams pass untouched. It does not look at routes: what is open is an exact
list of paths, and all else is closed, whatever its method and whether it exists.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config import AdmissionConfig
from serve_app.api_keys import Keys
from serve_app.callers import CALLER_STATE
from serve_app.errors import ApiError

ALWAYS_OPEN = frozenset({"/health", "/ready"})
"""What probes ask, which hold no key."""


def open_paths(config: AdmissionConfig) -> frozenset[str]:
    """The paths that answer without a key."""
    return ALWAYS_OPEN | {"/metrics"} if config.open_metrics else ALWAYS_OPEN


class ApiKeyGuard:
    """Lets pass who has a key, and tells the application whose it is: `callers.caller_of`.

    Args:
        keys: who may call.
        open_paths: exact paths, below the application's root path, that need no key. They have no
            caller.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or _path_below_root(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = self._keys.find(presented_key(Headers(scope=scope)))
        if caller is not None:
            scope.setdefault("state", {})[CALLER_STATE] = caller
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            response = _invalid_key().response()
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def presented_key(headers: Headers) -> bytes | None:
    """The key of `Authorization: Bearer KEY`, else of `x-api-key: KEY`; None: there is neither."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    key = credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
    # Starlette reads headers as latin-1, so this gives back the bytes that were sent.
    return None if key is None else key.encode("latin-1")


def _path_below_root(scope: Scope) -> str:
    """The path as the router will see it, which knows the prefix that Serve mounts it under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    is_below = root != "" and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] if is_below else path


def _invalid_key() -> ApiError:
    message = (
        "The API key is missing or not valid; send it as 'Authorization: Bearer KEY' "
        "or 'x-api-key: KEY'."
    )
    return ApiError(401, message, code="invalid_api_key")
