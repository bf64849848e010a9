"""Keys, limits, rates, tenants and metrics, on the service's own application."""

from __future__ import annotations

from typing import Any

import pytest
from api_doubles import ScriptedBackend, client_of, error_of
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from deployments.config import AdmissionConfig, ServiceConfig
from serve_app.ingress import make_api

COMPLETIONS = "/v1/completions"
KEYS = "team-a:sk-one,team-b:sk-two"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def client_with(backend: ScriptedBackend, **admission: Any) -> TestClient:
    return client_of(backend, ServiceConfig(admission=AdmissionConfig(**admission)))


def samples(
    client: TestClient, name: str, headers: dict[str, str] | None = None
) -> dict[str, float]:
    """Values of a metric by its labels other than those of the replica."""
    page = client.get("/metrics", headers=headers or {}).text
    return {
        " ".join(f"{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def test_with_keys_every_route_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """B35: a route that was added later, or the page of metrics, answers strangers."""
    monkeypatch.setenv("CHUNKSERVE_API_KEYS", KEYS)
    api = make_api(ScriptedBackend([[65]]), ServiceConfig())
    client = TestClient(api)
    paths = {route.path for route in api.routes if hasattr(route, "path")}
    assert {"/metrics", "/chunk", COMPLETIONS, "/openapi.json", "/docs"} <= paths
    for path in sorted(paths - {"/health", "/ready"}):
        for method in ("GET", "POST", "OPTIONS"):
            assert client.request(method, path).status_code == 401, (method, path)
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    answer = client.post(COMPLETIONS, json={"prompt": "hi"}, headers=bearer("sk-one"))
    assert answer.status_code == 200


def test_tenants_share_no_prefix_and_callers_of_one_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """B56: the time to a first token tells one tenant what another has sent."""
    monkeypatch.setenv("CHUNKSERVE_API_KEYS", KEYS)
    backend = ScriptedBackend([[65]])
    client = client_of(backend)
    for key in ("sk-one", "sk-two", "sk-one"):
        client.post(COMPLETIONS, json={"prompt": "hi"}, headers=bearer(key))
    first, other, again = (request.cache_salt for request in backend.requests)
    assert first == again != other


def test_a_full_bucket_is_429_and_its_refusals_are_counted() -> None:
    """B61: more than the rate gets through, or the refusal does not say when to come back."""
    backend = ScriptedBackend([[65]])
    client = client_with(backend, requests_per_s=0.01, burst=2)
    statuses = [client.post(COMPLETIONS, json={"prompt": "hi"}).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = client.post(COMPLETIONS, json={"prompt": "hi", "stream": True})
    assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
    assert int(refused.headers["Retry-After"]) >= 1
    assert len(backend.requests) == 2
    counted = samples(client, "chunkserve_ingress_requests_rejected_total")
    assert [value for labels, value in counted.items() if "rate_limit_exceeded" in labels] == [2.0]


def test_each_prompt_and_choice_counts_as_a_request() -> None:
    """One request of many prompts slips past the rate."""
    client = client_with(ScriptedBackend([[65]]), requests_per_s=0.01, burst=3)
    assert client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).status_code == 400
    assert client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}).status_code == 200
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 429


def test_what_an_answer_did_not_use_of_its_tokens_comes_back() -> None:
    """A client that asks for a long answer and gets a short one is locked out for a minute."""
    client = client_with(ScriptedBackend([[65]]), tokens_per_min=60)
    for stream in (False, True, False, True):
        body = {"prompt": "hi", "max_tokens": 30, "stream": stream}
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_prompts_that_ran_wait_no_more() -> None:
    """Prompt tokens that had their first token are counted as waiting for ever."""
    client = client_with(ScriptedBackend([[65]]), max_queued_prefill_tokens=4)
    for _ in range(3):
        assert client.post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200


@pytest.mark.parametrize(
    ("limit", "body", "param"),
    [
        ({"max_prompts": 2}, {"prompt": ["a", "b", "c"]}, "prompt"),
        ({"max_n": 2}, {"prompt": "a", "n": 3}, "n"),
        ({"max_tokens": 4}, {"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ({"max_prompt_tokens": 4}, {"prompt": "abcdefgh"}, "prompt"),
        ({"max_stop_length": 4}, {"prompt": "a", "stop": "abcde"}, "stop"),
        ({"max_logit_bias": 1}, {"prompt": "a", "logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ],
)
def test_limits_of_the_configuration_hold(
    limit: dict[str, int], body: dict[str, Any], param: str
) -> None:
    """B20: a huge request reaches the engine, or fills the memory."""
    backend = ScriptedBackend([[65]])
    error = error_of(client_with(backend, **limit).post(COMPLETIONS, json=body), 400)
    assert error["param"] == param
    assert backend.requests == []


def test_an_answer_without_a_bound_of_its_own_gets_the_services() -> None:
    """A client that names no max_tokens gets more than the service allows."""
    backend = ScriptedBackend([[65]])
    client_with(backend, max_tokens=4).post(COMPLETIONS, json={"prompt": "a"})
    assert backend.requests[0].sampling_params.max_tokens == 4


def test_a_body_over_the_bound_is_413() -> None:
    """B20: a body of any size is read into memory."""
    client = client_with(ScriptedBackend([[65]]), max_body_bytes=1024)
    error = error_of(client.post(COMPLETIONS, json={"prompt": "a" * 2000}), 413)
    assert error["code"] == "request_too_large"


def test_the_page_counts_what_clients_saw() -> None:
    """Answers, refusals and first tokens are not on the page, or are there twice."""
    client = client_of(ScriptedBackend([[65], [66]]))
    for stream in (True, False):
        client.post(COMPLETIONS, json={"prompt": "hi", "stream": stream, "n": 2})
    client.post(COMPLETIONS, json={"prompt": ""})
    ended = samples(client, "chunkserve_ingress_requests_ended_total")
    assert list(ended.values()) == [4.0]
    assert list(samples(client, "chunkserve_time_to_first_token_seconds_count").values()) == [4.0]
    assert list(samples(client, "chunkserve_ingress_generation_tokens_total").values()) == [8.0]
    assert list(samples(client, "chunkserve_ingress_requests_in_progress").values()) == [0.0]
    rejected = samples(client, "chunkserve_ingress_requests_rejected_total")
    assert list(rejected.values()) == [1.0]


def test_a_rate_is_kept_before_a_prompt_is_read() -> None:
    """B61: whoever is over the rate still has every prompt tokenized, and bad requests cost
    nothing.
    """
    client = client_with(ScriptedBackend([[65]]), requests_per_s=0.001, burst=1)
    too_long = {"prompt": "x" * 1000}
    assert error_of(client.post(COMPLETIONS, json=too_long), 400)["param"] == "prompt"
    assert error_of(client.post(COMPLETIONS, json=too_long), 429)["code"] == "rate_limit_exceeded"
