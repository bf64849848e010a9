"""Logs and refusals keep the secrets of clients: no prompt, no key, no stack trace."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from api_doubles import ScriptedBackend
from fastapi.testclient import TestClient

from deployments.config import ServiceConfig
from deployments.protocol import ErrorInfo, ErrorKind
from serve_app.api_keys import KeyRing, parse_key_list
from serve_app.body_limit import BodyLimit
from serve_app.ingress import make_api
from serve_app.key_guard import ApiKeyGuard, open_paths

MARKER = "zebra-quartz"
KEY = "sk-walrus-7"
CHAT = {"messages": [{"role": "user", "content": MARKER}]}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARKER}),
    ("/v1/completions", {"prompt": MARKER, "stream": True}),
    ("/v1/completions", {"prompt": MARKER, "stop": [MARKER], "user": MARKER}),
    ("/v1/completions", {"prompt": MARKER, "temperature": 9}),
    ("/v1/completions", {"prompt": {"text": MARKER}}),
    ("/v1/completions", {"prompt": MARKER * 100}),
    ("/v1/completions", {"prompt": MARKER * 1000}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "model": MARKER}),
    ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": MARKER}]}),
    ("/chunk", {"prompt": MARKER}),
]
BACKENDS = [
    ScriptedBackend([[65], [66]]),
    ScriptedBackend([[65]], error=ErrorInfo(ErrorKind.ENGINE, "the step failed")),
    ScriptedBackend([], error=ErrorInfo(ErrorKind.OVERLOADED, "full")),
    ScriptedBackend([], raises=RuntimeError("broken")),
]


def make_client(backend: ScriptedBackend) -> TestClient:
    api = make_api(backend, ServiceConfig())
    api.add_middleware(BodyLimit, max_bytes=10_000)
    paths = open_paths(ServiceConfig().admission)
    api.add_middleware(ApiKeyGuard, keys=KeyRing(parse_key_list(KEY)), open_paths=paths)
    return TestClient(api, raise_server_exceptions=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_prompt_and_no_key_is_logged(
    path: str, body: dict[str, Any], backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client sends, or its key, can be read in the log, at whatever level."""
    caplog.set_level(logging.DEBUG)
    client = make_client(backend)
    answer = client.post(path, json=body, headers={"Authorization": f"Bearer {KEY}"})
    refused = client.post(path, json=body, headers={"x-api-key": f"{KEY}-no"})
    assert (answer.status_code != 401, refused.status_code) == (True, 401)
    # The request's own line of httpx, the client, shows that logs are read at all.
    assert path in caplog.text
    assert MARKER not in caplog.text and KEY not in caplog.text


def test_a_marker_that_is_logged_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """The test above reads no log of ours, so it cannot fail."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("serve_app.streaming").debug("prompt: %s", MARKER)
    assert MARKER in caplog.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_sees_no_stack_trace(is_streamed: bool) -> None:
    """A fault inside shows a client files, lines and what other requests hold."""
    client = make_client(ScriptedBackend([], raises=RuntimeError(f"secret {MARKER}")))
    body = {"prompt": "hi", "stream": is_streamed}
    answer = client.post("/v1/completions", json=body, headers={"x-api-key": KEY})
    assert answer.status_code == 500
    for trace in ("Traceback", "RuntimeError", ".py", MARKER):
        assert trace not in answer.text
