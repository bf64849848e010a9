"""/tokenize, /detokenize, /health, /ready, /version and the OpenAPI page."""

from __future__ import annotations

from typing import Any

import pytest
from api_doubles import ScriptedBackend, client_of, error_of, make_tokenizer
from fastapi.testclient import TestClient

from deployments.protocol import ModelCard
from serve_app.errors import BackendUnavailable

TOKENIZER = make_tokenizer()
HARD_TEXT = "客单价 👩‍🚀 שלום e\u0301 <|im_start|>hello"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of(ScriptedBackend([[65]]))


def test_tokenize_and_detokenize_are_inverse(client: TestClient) -> None:
    """A text does not survive the way to token ids and back, or special tokens are lost."""
    answer = client.post("/tokenize", json={"prompt": HARD_TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENIZER.encode(HARD_TEXT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 64
    assert answer["token_strs"][-1] == "hello" and "<|im_start|>" in answer["token_strs"]
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": HARD_TEXT}


def test_tokenize_renders_messages_as_chat_does(client: TestClient) -> None:
    """The count of a conversation differs from what chat makes of it."""
    backend = ScriptedBackend([[65]])
    body = {"messages": [{"role": "user", "content": "hi"}]}
    client_of(backend).post("/v1/chat/completions", json=body)
    answer = client.post("/tokenize", json=body).json()
    assert answer["tokens"] == list(backend.requests[0].prompt_token_ids)
    assert answer["token_strs"] is None
    closed = client.post("/tokenize", json=body | {"add_generation_prompt": False}).json()
    assert closed["count"] < answer["count"]


def test_an_empty_text_has_no_tokens(client: TestClient) -> None:
    """Counting nothing is an error."""
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
    ],
    ids=str,
)
def test_bad_bodies_are_named(
    client: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    """A token id out of range, or a body that says nothing, is a 500."""
    assert error_of(client.post(path, json=body), 400)["param"] == param


def test_another_models_text_is_a_404(client: TestClient) -> None:
    """Tokens of this model are given out as those of another."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        error_of(client.post(path, json=body | {"model": "gpt-4"}), 404)
        assert client.post(path, json=body | {"model": "tiny"}).status_code == 200


def test_ready_is_a_loaded_model_that_can_serve(client: TestClient) -> None:
    """Traffic is sent to a service whose model is not there yet, or whose replicas are sick."""

    class Loading(ScriptedBackend):
        async def model_card(self) -> ModelCard:
            raise BackendUnavailable("still loading")

    assert client.get("/ready").json() == {"status": "ok"}
    for backend in (Loading(), ScriptedBackend(sickness="still loading")):
        answer = client_of(backend).get("/ready")
        assert "still loading" in error_of(answer, 503)["message"]
        assert int(answer.headers["Retry-After"]) >= 1
    assert client_of(Loading()).get("/health").status_code == 200


def test_the_version_is_told(client: TestClient) -> None:
    """/version is empty."""
    assert client.get("/version").json()["version"]


def test_the_page_shows_every_route_with_its_models(client: TestClient) -> None:
    """A route, its request or its errors are missing from the OpenAPI page."""
    page = client.get("/openapi.json").json()
    schemas = page["components"]["schemas"]
    api: Any = client.app
    served = {route.path for route in api.routes if getattr(route, "include_in_schema", False)}
    assert {path.replace(":path", "") for path in served} == set(page["paths"])
    for path, methods in page["paths"].items():
        for method, told in methods.items():
            if method == "post":
                ref = told["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert ref.rpartition("/")[2] in schemas
                assert "400" in told["responses"]
            if path not in ("/version", "/metrics"):
                assert "503" in told["responses"]
    assert {"temperature", "prompt", "echo"} <= set(schemas["CompletionRequest"]["properties"])
    assert client.get("/openapi.json").json() == page


def test_wrong_methods_say_which_are_right(client: TestClient) -> None:
    """A 405 lacks the Allow header."""
    answer = client.delete("/version")
    error_of(answer, 405)
    assert answer.headers["Allow"] == "GET"
