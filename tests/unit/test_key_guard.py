"""Who gets in: keys, their places in files and headers, and what is open without one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from deployments.config import AdmissionConfig, ConfigError
from serve_app import api_keys
from serve_app.api_keys import (
    CHECK_PERIOD_S,
    KEYS_VARIABLE,
    KeyRing,
    Keys,
    make_keys,
    parse_key_list,
)
from serve_app.callers import ANONYMOUS, Caller, caller_of
from serve_app.key_guard import ApiKeyGuard, open_paths

KEY = "sk-very-secret-1"
OTHER = "sk-very-secret-2"


def make_app(keys: Keys, config: AdmissionConfig | None = None) -> FastAPI:
    api = FastAPI()

    @api.post("/v1/completions")
    @api.post("/chunk")
    @api.get("/metrics")
    async def who(request: Request) -> str:
        return caller_of(request.scope).name

    @api.get("/health")
    @api.get("/ready")
    async def health() -> str:
        return "ok"

    @api.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(iter([b"one", b"two"]))

    paths = open_paths(config or AdmissionConfig())
    api.add_middleware(ApiKeyGuard, keys=keys, open_paths=paths)
    return api


def ring() -> KeyRing:
    return KeyRing(parse_key_list(f"ann:{KEY},bob:{OTHER}"))


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_app(ring()))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_route_but_health_is_closed_whatever_the_method(method: str) -> None:
    """B35: the key was asked for by a test of the path's prefix, so that other routes to the same
    handler, OPTIONS, and paths that only look like an open one were answered without it.
    """
    app = make_app(ring())
    client = TestClient(app)
    registered = {route.path for route in app.routes} - {"/health", "/ready"}  # type: ignore[attr-defined]
    assert {"/v1/completions", "/chunk", "/metrics", "/openapi.json"} <= registered
    lookalikes = {
        "/health/", "//health", "/health/x", "/healthz", "/HEALTH", "/v1/health", "/x/../health/x",
        "/ready%2f..", "/health%00", "/", "/no/such/route", "/v1/../health.json",
    }  # fmt: skip
    for path in registered | lookalikes:
        answer = client.request(method, path, headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 401, (method, path)
        assert client.request(method, path).status_code == 401, (method, path)


def test_a_refusal_has_openais_shape(client: TestClient) -> None:
    """An OpenAI client cannot tell a wrong key from another failure."""
    answer = client.post("/chunk", headers=bearer("wrong"))
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in answer.text


def test_probes_need_no_key(client: TestClient) -> None:
    """A probe of Kubernetes has no key, so a service with keys is never found healthy."""
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_metrics_are_open_by_choice_alone() -> None:
    """Numbers of all tenants are shown to anybody by default, or cannot be opened at all."""
    assert TestClient(make_app(ring())).get("/metrics").status_code == 401
    opened = AdmissionConfig(open_metrics=True)
    assert open_paths(opened) == {"/health", "/ready", "/metrics"}


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "Authorization": "Basic eDp5"},
    ],
)
def test_a_key_is_read_from_either_header(client: TestClient, headers: dict[str, str]) -> None:
    """A client that sends its key as other services want it is refused."""
    assert client.post("/chunk", headers=headers).json() == "ann"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
        {"Authorization": "Bearer wrong", "x-api-key": KEY},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_what_is_no_key_is_refused(client: TestClient, headers: dict[Any, Any]) -> None:
    """A part of a key, an empty one or one under another scheme opens the service."""
    assert client.post("/chunk", headers=headers).status_code == 401


def test_each_key_has_its_caller(client: TestClient) -> None:
    """Callers are confused, so one is billed and limited for another."""
    names = [client.post("/chunk", headers=bearer(key)).json() for key in (OTHER, KEY)]
    assert names == ["bob", "ann"]


def test_every_key_is_compared_whichever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a comparison tells how far down the list a key stands, or that it is none."""
    compared: list[int] = []
    original = api_keys.hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(len(left))
        return original(left, right)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", counting)
    keys = ring()
    for presented in (KEY, OTHER, "wrong"):
        keys.find(presented.encode())
    assert compared == [hashlib.sha256().digest_size] * 6


def test_a_stream_passes_untouched(client: TestClient) -> None:
    """The guard collects a stream before it passes it on."""
    assert client.get("/stream", headers=bearer(KEY)).content == b"onetwo"


def test_a_websocket_needs_a_key_too(client: TestClient) -> None:
    """The guard looks at HTTP alone, so another protocol gets by."""
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/chunk"):
        pass
    assert refused.value.code == 1008


def test_a_prefix_before_all_routes_opens_nothing_else() -> None:
    """Under Serve's route_prefix, health is closed, or a path of the prefix's own name is open."""
    client = TestClient(make_app(ring()), root_path="/llm")
    assert client.get("/llm/health").status_code == 200
    assert client.post("/llm/chunk").status_code == 401
    named = TestClient(make_app(ring()), root_path="/health")
    assert named.get("/health").status_code == 401


def test_without_keys_everybody_is_the_anonymous_caller() -> None:
    """A service on one's own machine asks for a key that was never set."""
    keys = make_keys(AdmissionConfig(), {}, lambda: 0.0)
    assert TestClient(make_app(keys)).post("/chunk").json() == ANONYMOUS.name


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def write_keys(path: Path, *entries: dict[str, Any]) -> AdmissionConfig:
    path.write_text(json.dumps(entries))
    return AdmissionConfig(keys_file=path)


def test_a_file_gives_callers_their_limits(tmp_path: Path) -> None:
    """A caller's own limits are lost between the file and admission."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    config = write_keys(
        tmp_path / "keys.json",
        {"name": "ann", "sha256": digest, "requests_per_s": 2.5, "burst": 7, "priority": 1},
        {"name": "bob", "key": OTHER, "tokens_per_min": 600, "tenant": "firm"},
    )
    keys = make_keys(config, {KEYS_VARIABLE: "eve:sk-3,sk-4"}, lambda: 0.0)
    assert keys.find(KEY.encode()) == Caller("ann", 1, "ann", 2.5, None, 7)
    assert keys.find(OTHER.encode()) == Caller("bob", 0, "firm", None, 600, None)
    assert keys.find(b"sk-3") == Caller("eve", salt="eve")
    unnamed = keys.find(b"sk-4")
    assert unnamed is not None and unnamed.name.startswith("key-") and "sk-4" not in unnamed.name


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that was taken back opens the service until a restart; or a file that was broken in
    an edit locks everybody out.
    """
    caplog.set_level(logging.DEBUG)
    clock, path = Clock(), tmp_path / "keys.json"
    keys = make_keys(write_keys(path, {"name": "ann", "key": KEY}), {}, clock)

    def after_change(text: str) -> tuple[bool, bool]:
        path.write_text(text)
        clock.now_s += CHECK_PERIOD_S
        return keys.find(KEY.encode()) is not None, keys.find(OTHER.encode()) is not None

    assert after_change(json.dumps([{"name": "ann", "key": OTHER}])) == (False, True)
    for broken in ("", "[]", "[{", f"- name: x\n  kee: {KEY}", f"a: [{KEY}"):
        assert after_change(broken) == (False, True)
    path.unlink()
    clock.now_s += CHECK_PERIOD_S
    assert keys.find(OTHER.encode()) is not None
    assert after_change(json.dumps([{"name": "ann", "key": KEY}])) == (True, False)
    assert caplog.text.count("stay as they were") == 6
    assert KEY not in caplog.text and OTHER not in caplog.text


def test_the_file_is_not_looked_at_for_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request pays for a look at the disk."""
    keys = make_keys(write_keys(tmp_path / "k", {"name": "ann", "key": KEY}), {}, lambda: 0.0)
    monkeypatch.setattr(os, "stat", lambda *_args, **_more: pytest.fail("looked at the disk"))
    assert keys.find(KEY.encode()) is not None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"- {{name: a, key: {KEY}, nmae: b}}", "entry 1: .*did you mean 'name'"),
        (f"- {{name: a, {KEY}: b}}", "entry 1: has an unknown key"),
        (f"- {{key: {KEY}}}", "entry 1: name"),
        ("- {name: a}", "entry 1: needs either key or sha256"),
        ("- {name: a, key: ''}", "entry 1: key"),
        (f"- {{name: a, sha256: {KEY}}}", "sha256 must be 64 hexadecimal digits"),
        (f"- {{name: a, sha256: {hashlib.sha256().hexdigest()}}}", "of a is empty"),
        (f"- {{name: a, key: {KEY}, requests_per_s: 0}}", "entry 1: requests_per_s"),
        (f"- {{name: a, key: [{KEY}]}}", "entry 1: key"),
        (f"- {KEY}", "entry 1"),
        (f"{KEY}: a", "must be a list"),
        (f"- {{name: a, key: {KEY}}}\n- {{name: a, key: x}}", "same name: a"),
        (f"- {{name: a, key: {KEY}}}\n- {{name: b, key: {KEY}}}", "a and b have the same API key"),
        ("[]", "no API keys"),
        (f"- [{KEY}", "not valid YAML .line"),
    ],
)
def test_a_fault_in_a_file_is_named_without_the_key(
    tmp_path: Path, content: str, expected: str
) -> None:
    """A message about a file of keys shows a key, in a log that many read."""
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=expected) as refused:
        make_keys(AdmissionConfig(keys_file=path), {}, lambda: 0.0)
    assert str(path) in str(refused.value) and KEY not in str(refused.value)


@pytest.mark.parametrize("text", ["", " , ", "ann:", f"ann:{KEY},ann:{OTHER}", f"{KEY},{KEY}"])
def test_a_list_without_real_keys_never_opens_the_service(text: str) -> None:
    """A secret that came out empty serves everybody."""
    with pytest.raises(ConfigError, match=KEYS_VARIABLE) as refused:
        make_keys(AdmissionConfig(), {KEYS_VARIABLE: text}, lambda: 0.0)
    assert KEY not in str(refused.value)


def test_no_repr_shows_a_key_or_its_digest() -> None:
    """A key stands in a trace or a log because something that holds it was printed."""
    records = parse_key_list(f"ann:{KEY}")
    shown = repr(records) + repr(vars(KeyRing(records))) + repr(records[0].caller)
    digest = hashlib.sha256(KEY.encode()).digest()
    assert KEY not in shown and digest.hex() not in shown and repr(digest)[2:-1] not in shown
