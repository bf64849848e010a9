"""What is refused, with which status, and that the message helps (public faults B13, B14, B19, B22,
B29, B34).
"""

from __future__ import annotations

from typing import Any

import pytest
from api_doubles import ScriptedBackend, error_of, make_card, make_tokenizer
from fastapi.testclient import TestClient

from deployments.config import ServiceConfig
from serve_app.ingress import make_api

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend([[65]])


@pytest.fixture(scope="module")
def client(backend: ScriptedBackend) -> TestClient:
    return TestClient(make_api(backend, ServiceConfig()), raise_server_exceptions=False)


BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "1"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": -1},
    {"n": 0},
    {"n": 129},
    {"n": 100000},
    {"n": True},
    {"presence_penalty": 5},
    {"repetition_penalty": 0},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": 5},
    {"seed": 1.5},
    {"seed": 2**63},
    {"stream": "yes"},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 65},
    {"max_tokens": 10**9},
    {"min_tokens": -1},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"320": 1}},
    {"stop_token_ids": [320]},
    {"stop_token_ids": [-1]},
    {"priority": -1},
    {"priority": True},
    {"cache_salt": "x" * 1025},
    {"suffix": "x"},
    {"best_of": 2},
    {"best_of": True},
    {"best_of": 1.0},
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True},
    {"allowed_token_ids": [1]},
    {"prompt_embeds": "AAAA"},
    {"truncation_side": "right"},
    {"web_search_options": {}},
    {"thinking_token_budget": 5},
    {"vllm_xargs": {"a": 1}},
    {"bad_words": ["x"]},
    {"logit_bias": {"05": 1}},
    {"tools": [{}]},
    {"functions": [{}]},
    {"prompt_logprobs": 1},
    {"guided_grammar": "x"},
    {"stop": "x" * 1001},
    {"stop_token_ids": [1] * 129},
    {"logit_bias": {str(index): 1 for index in range(1025)}},
    {"service_tier": "gold"},
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": "1"},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -2},
    {"include_stop_str_in_output": 1},
    {"skip_special_tokens": "no"},
    {"add_special_tokens": 0},
    {"stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("bad", BAD_FIELDS, ids=str)
@pytest.mark.parametrize(
    "path, body", [("completions", {"prompt": "hi"}), ("chat/completions", CHAT)]
)
def test_a_bad_field_is_a_400_that_names_it(
    client: TestClient, path: str, body: dict[str, Any], bad: dict[str, Any]
) -> None:
    """A value out of range or of the wrong type is accepted, or is an opaque 422 or 500."""
    error = error_of(client.post(f"/v1/{path}", json=body | bad), 400)
    (name,) = bad
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name and error["message"].startswith(name)


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(client: TestClient, raw: str) -> None:
    """NaN passes every comparison with a range and reaches the sampler."""
    answer = client.post("/v1/completions", content=f'{{"prompt": "hi", "temperature": {raw}}}')
    assert error_of(answer, 400)["param"] == "temperature"


@pytest.mark.parametrize("value", [-1, 21, 100, True, "1", 1.5])
def test_completion_logprobs_is_a_small_number(client: TestClient, value: Any) -> None:
    """logprobs out of range, or a bool, is accepted by completions."""
    answer = client.post("/v1/completions", json={"prompt": "hi", "logprobs": value})
    assert error_of(answer, 400)["param"] == "logprobs"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 65}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ],
    ids=str,
)
def test_bad_chat_fields_are_named_as_the_client_named_them(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    """A fault of a chat request is reported under a name the client never wrote."""
    error = error_of(client.post("/v1/chat/completions", json=CHAT | fields), 400)
    assert error["param"] == param and error["message"].startswith(
        (param, "the model's chat template")
    )


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b"[" * 10000, b'{"prompt":"\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_a_400(client: TestClient, raw: bytes) -> None:
    """A body that cannot be read is a 422 or a 500."""
    for path in ("/v1/completions", "/v1/chat/completions", "/chunk"):
        error_of(client.post(path, content=raw), 400)


def test_a_body_needs_no_content_type(client: TestClient) -> None:
    """curl -d without a header is refused, for its default Content-Type is that of a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (
        client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=form).status_code == 200
    )


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_refused(
    client: TestClient, backend: ScriptedBackend, prompt: Any
) -> None:
    """A prompt without tokens reaches the engine."""
    before = len(backend.requests)
    assert (
        error_of(client.post("/v1/completions", json={"prompt": prompt}), 400)["param"] == "prompt"
    )
    assert len(backend.requests) == before


@pytest.mark.parametrize(
    "prompt",
    [
        *[None, 5, {}, [None], ["a", 1], [[1], "a"], [[1], ["a"]], [[[1]]], [1, "a"], [1, [1]]],
        *[[True], [1.0], [-1], [320], [[1], [320]], [2**70], ["a"] * 10**5, [1] * 10**5 + ["a"]],
    ],
    ids=lambda prompt: str(prompt)[:20],
)
def test_a_prompt_of_another_kind_is_refused(client: TestClient, prompt: Any) -> None:
    """Foreign types or ids out of the vocabulary reach the engine, or fill the error."""
    answer = client.post("/v1/completions", json={"prompt": prompt})
    assert error_of(answer, 400)["param"] == "prompt"
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], TOKENIZER.encode("hello"), [TOKENIZER.encode("hello")]]
)
def test_one_prompt_may_come_in_four_forms(
    client: TestClient, backend: ScriptedBackend, prompt: Any
) -> None:
    """A single prompt in a list, or as token ids, is refused or read as something else."""
    assert client.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    assert list(backend.requests[-1].prompt_token_ids) == TOKENIZER.encode("hello")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    client: TestClient, stream: bool
) -> None:
    """A prompt without room for one token is served, or refused without saying how long."""
    for length in (64, 65, 128):
        error = error_of(
            client.post("/v1/completions", json={"prompt": [1] * length, "stream": stream}), 400
        )
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"] and "64" in error["message"]
    assert (
        client.post("/v1/completions", json={"prompt": [1] * 63, "max_tokens": 64}).status_code
        == 200
    )


def test_another_model_is_a_404(client: TestClient) -> None:
    """A request for a model that is not served is answered by the one that is."""
    for path, body in (("completions", {"prompt": "hi"}), ("chat/completions", CHAT)):
        error = error_of(client.post(f"/v1/{path}", json=body | {"model": "gpt-4"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert client.post(f"/v1/{path}", json=body | {"model": "tiny"}).status_code == 200
    error_of(client.get("/v1/models/gpt-4"), 404)


def test_unknown_routes_and_methods_have_the_same_shape(client: TestClient) -> None:
    """A wrong route or method is answered in another shape than all other errors."""
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_what_openai_clients_send_beside_is_ignored(client: TestClient) -> None:
    """Fields that change nothing here make a request fail."""
    beside = {
        "store": None,
        "metadata": {},
        "n": 1,
        "user": "me",
        "best_of": 1,
        "echo": False,
        "tools": None,
    }
    nulls = dict.fromkeys(
        ["temperature", "top_p", "max_tokens", "stop", "seed", "logit_bias", "stream"]
    )
    assert (
        client.post("/v1/completions", json={"prompt": "hi", **beside, **nulls}).status_code == 200
    )


def test_sampling_fields_reach_the_engine(client: TestClient, backend: ScriptedBackend) -> None:
    """A sampling field is dropped or renamed on the way to the engine."""
    fields = {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "max_tokens": 5,
        "min_tokens": 2, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,
        "ignore_eos": True,
    }  # fmt: skip
    extra = {
        "logit_bias": {"5": -100},
        "stop_token_ids": [9],
        "priority": 2,
        "cache_salt": "me",
        "logprobs": 1,
    }
    assert (
        client.post("/v1/completions", json={"prompt": "hi", **fields, **extra}).status_code == 200
    )
    request = backend.requests[-1]
    params = request.sampling_params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.stop_token_ids, params.num_logprobs) == (
        ((5, -100.0),),
        (9,),
        1,
    )
    assert (request.priority, request.cache_salt) == (2, "me")
    client.post("/v1/completions", json={"prompt": "hi", "top_k": -1})
    assert backend.requests[-1].sampling_params.top_k == 0
    assert backend.requests[-1].sampling_params.max_tokens == 16


def test_a_model_without_a_chat_template_says_so() -> None:
    """Chat with a model that has no template is a 500."""
    backend = ScriptedBackend([[65]], card=make_card(chat_template=None))
    client = TestClient(make_api(backend, ServiceConfig()))
    error = error_of(client.post("/v1/chat/completions", json=CHAT), 400)
    assert "chat template" in error["message"] and "/v1/completions" in error["message"]


def test_a_fault_inside_is_a_500_without_a_trace() -> None:
    """A stack trace or an internal text reaches the client."""

    class Broken(ScriptedBackend):
        async def model_card(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("secret")

    client = TestClient(make_api(Broken(), ServiceConfig()), raise_server_exceptions=False)
    answer = client.post("/v1/completions", json={"prompt": "hi"})
    assert error_of(answer, 500)["type"] == "server_error"
    assert "secret" not in answer.text


def test_a_request_id_is_echoed_bounded_and_never_the_engines(
    client: TestClient, backend: ScriptedBackend
) -> None:
    """The client's request id is the engine's key, so that two requests with the same id mix."""
    for _ in range(2):
        answer = client.post(
            "/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "same"}
        )
        assert answer.headers["X-Request-Id"] == "same"
    first, second = (request.request_id for request in backend.requests[-2:])
    assert first != second and "same" not in first + second
    answer = client.get("/v1/models", headers={"X-Request-Id": "x" * 5000})
    assert answer.headers["X-Request-Id"] == "x" * 128
    assert client.get("/v1/models").headers["X-Request-Id"]


def test_health_and_stats_and_models(client: TestClient, backend: ScriptedBackend) -> None:
    """/health says 200 while no replica can serve."""
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/stats").json()[0]["num_blocks"] == 8
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 64
    sick = TestClient(make_api(ScriptedBackend(sickness="the engine died"), ServiceConfig()))
    answer = sick.get("/health")
    assert "the engine died" in error_of(answer, 503)["message"]
    assert int(answer.headers["Retry-After"]) >= 1


def test_the_model_card_is_asked_for_once() -> None:
    """Every request fetches the tokenizer again, or a run lifespan is needed."""
    backend = ScriptedBackend([[65]])
    api = make_api(backend, ServiceConfig())
    with TestClient(api) as client:
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": "hi"})
    TestClient(api).get("/v1/models")
    assert backend.num_cards_asked == 1
