"""Bodies that are long and wrong: an error for each of their items would hold up everybody."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from api_doubles import ScriptedBackend, client_of, error_of
from pydantic import ValidationError

from serve_app.api_base import ApiModel
from serve_app.api_models import CompletionRequest
from serve_app.chat_models import ChatCompletionRequest
from serve_app.off_loop import run_sized
from serve_app.text_models import TokenizeRequest

MANY = 2000
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "kind, body",
    [
        (ChatCompletionRequest, {"messages": [{"role": "nobody"}] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"a": 1}] * MANY}]}),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1] * MANY}]},
        ),
        (ChatCompletionRequest, CHAT | {"tools": [1] * 100}),
        (TokenizeRequest, {"messages": [{"role": "nobody"}] * MANY}),
        (TokenizeRequest, CHAT | {"tools": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 100}),
        (CompletionRequest, {"prompt": ["a", *[1] * 1000]}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): "a" for n in range(MANY)}}),
    ],
)
def test_a_long_list_of_faults_is_told_by_its_first(
    kind: type[ApiModel], body: dict[str, Any]
) -> None:
    """B64: a hundred thousand bad messages cost seconds of errors that nobody reads, while every
    stream of the ingress stands still."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    # A union tells of each of its members.
    assert caught.value.error_count() <= 5


def test_a_padded_body_is_refused_as_a_small_one_is() -> None:
    """A body that is parsed off the event loop gets a 500, or another error than a small one."""
    client = client_of(ScriptedBackend([[65]]))
    small = {"prompt": "a", "temperature": -1}
    errors = [
        error_of(client.post("/v1/completions", json=small | {"user": "x" * size}), 400)
        for size in (1, 200_000)
    ]
    assert errors[0] == errors[1]


def test_large_work_leaves_the_loop_and_small_work_stays() -> None:
    """Everything is done in threads, which costs more than small work, or nothing is."""

    async def threads() -> list[int]:
        return [await run_sized(size, threading.get_ident, 100) for size in (100, 101)]

    here, away = asyncio.run(threads())
    assert here == threading.get_ident() != away
