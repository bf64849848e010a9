"""Sizes of one request that are refused whatever the load (B20)."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.config import AdmissionConfig
from serve_app.errors import ApiError
from serve_app.limits import RequestLimits, RequestShape

LIMITS = RequestLimits(AdmissionConfig(max_tokens=1000, max_prompt_tokens=500))

AT_THE_LIMIT: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"num_prompts": 128}),
    ("n", {"n": 16}),
    ("n", {"num_prompts": 64, "n": 4}),
    ("max_tokens", {"max_tokens": 1000}),
    ("stop", {"stop_strings": ["a"] * 4}),
    ("stop", {"stop_strings": ["a", "b" * 256]}),
    ("stop_token_ids", {"num_stop_token_ids": 128}),
    ("logit_bias", {"num_logit_bias": 1024}),
]


def one_more(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return [*value, "a"] if len(value) == 4 else [*value[:-1], value[-1] + "b"]


@pytest.mark.parametrize(("param", "shape"), AT_THE_LIMIT)
def test_a_limit_holds_and_names_the_field(param: str, shape: dict[str, Any]) -> None:
    """B20: a huge n, list of prompts or max_tokens hangs the process or eats its memory."""
    LIMITS.check_shape(RequestShape(**shape))
    name, value = list(shape.items())[-1]
    with pytest.raises(ApiError, match="at most") as refused:
        LIMITS.check_shape(RequestShape(**{**shape, name: one_more(value)}))
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "shape", [{"n": 100_000}, {"n": 512, "num_prompts": 100}, {"num_prompts": 100_000}]
)
def test_the_reported_requests_are_refused(shape: dict[str, int]) -> None:
    """B20, as reported: n=100000; n=512 with 100 prompts; a list of 10^5 strings."""
    with pytest.raises(ApiError) as refused:
        LIMITS.check_shape(RequestShape(**shape))
    assert refused.value.status == 400


def test_a_field_is_called_what_the_client_called_it() -> None:
    """A client that sent max_completion_tokens is told of a field it never sent."""
    shape = RequestShape(max_tokens=1001, max_tokens_param="max_completion_tokens")
    with pytest.raises(ApiError, match="^max_completion_tokens") as refused:
        LIMITS.check_shape(shape)
    assert refused.value.param == "max_completion_tokens"


def test_a_long_prompt_is_refused_by_tokens() -> None:
    """The operator's limit on prompts is not kept, or has another code than the model's."""
    LIMITS.check_prompt(500, "messages")
    with pytest.raises(ApiError) as refused:
        LIMITS.check_prompt(501, "messages")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_a_bound_nobody_asked_for_stays_within_the_limit() -> None:
    """Chats without max_tokens are refused, or answered beyond the operator's limit."""
    assert (LIMITS.default_max_tokens(10), LIMITS.default_max_tokens(5000)) == (10, 1000)


def test_without_limits_of_its_own_the_service_takes_what_the_model_takes() -> None:
    """Defaults refuse what the model could serve."""
    limits = RequestLimits(AdmissionConfig())
    limits.check_shape(RequestShape(max_tokens=10**9))
    limits.check_prompt(10**9, "prompt")
    assert limits.default_max_tokens(10**9) == 10**9
