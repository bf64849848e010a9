"""Bodies that are almost right, and the words in which they are refused."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from api_doubles import ScriptedBackend, client_of, error_of
from fastapi.testclient import TestClient

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of(ScriptedBackend([[65]]))


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "", "bad_words": [], "logits_processors": [], "allowed_token_ids": []},
        {"truncation_side": "left", "return_token_ids": False, "vllm_xargs": {}, "best_of": 1},
        {"functions": None, "modalities": ["text"], "use_beam_search": False, "tools": []},
    ],
    ids=str,
)
def test_what_changes_nothing_is_no_reason_to_refuse(
    client: TestClient, fields: dict[str, Any]
) -> None:
    """Clients that send every field they know with its default are turned away."""
    assert client.post("/v1/completions", json={"prompt": "hi"} | fields).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | fields).status_code == 200


@pytest.mark.parametrize(
    "body, message",
    [
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string (got 1)"),
        ({"prompt": [[1, "x"]]}, "prompt.0.1: Input should be a valid integer (got 'x')"),
        ({"prompt": None}, "prompt: Input should be a valid string (got null)"),
        ({"prompt": ["a", None]}, "prompt.1: Input should be a valid string (got null)"),
        ({"prompt": "a", "seed": True}, "seed: Input should be a valid integer (got true)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_speaks_of_what_the_client_sent(
    client: TestClient, body: dict[str, Any], message: str
) -> None:
    """A message names a type of ours ("prompt.texts.1") or shows Python's None for null."""
    assert error_of(client.post("/v1/completions", json=body), 400)["message"] == message


def test_an_answer_of_the_prompt_alone_has_no_least_length(client: TestClient) -> None:
    """max_tokens 0 with min_tokens 1 is accepted, though no answer can be both."""
    body = {"prompt": "hi", "echo": True, "max_tokens": 0, "min_tokens": 1}
    assert error_of(client.post("/v1/completions", json=body), 400)["param"] == "min_tokens"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "x" * 1000])
def test_a_compressed_body_is_called_so(client: TestClient, encoding: str) -> None:
    """A gzipped body is reported as broken JSON."""
    content = gzip.compress(b'{"prompt": "hi"}')
    answer = client.post("/v1/completions", content=content, headers={"Content-Encoding": encoding})
    error = error_of(answer, 415)
    assert "uncompressed" in error["message"] and len(error["message"]) < 200
    plain = client.post(
        "/v1/completions", content=b'{"prompt": "hi"}', headers={"Content-Encoding": "identity"}
    )
    assert plain.status_code == 200


def test_a_body_in_another_encoding_is_told_the_right_one(client: TestClient) -> None:
    """A UTF-16 body is broken JSON without a reason."""
    answer = client.post("/v1/completions", content='{"prompt": "hi"}'.encode("utf-16"))
    assert "UTF-8" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/chunk/"])
def test_a_slash_too_many_is_a_404_of_ours(client: TestClient, path: str) -> None:
    """The service answers with a redirect to its own address, which clients behind a proxy cannot
    reach, and turns https into http.
    """
    for method in (client.get, client.post):
        assert error_of(method(path, follow_redirects=False), 404)["code"] == "not_found"


def test_chunks_of_another_model_are_a_404(client: TestClient) -> None:
    """/chunk cuts a prompt by the tokenizer of a model that the client did not ask for."""
    assert client.post("/chunk", json={"prompt": "hi", "model": "tiny"}).status_code == 200
    answer = client.post("/chunk", json={"prompt": "hi", "model": "other"})
    assert error_of(answer, 404)["code"] == "model_not_found"
