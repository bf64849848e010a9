"""echo: the answer begins with its prompt, exactly, with logprobs (public faults B02, B31)."""

from __future__ import annotations

from typing import Any

import pytest
from api_doubles import (
    ScriptedBackend,
    byte_ids,
    client_of,
    error_of,
    make_tokenizer,
    post,
    post_stream,
    text_of,
)

from deployments.protocol import ErrorInfo, ErrorKind

TOKENIZER = make_tokenizer()
COMPLETIONS = "/v1/completions"
HARD_PROMPT = "客单价 👩‍🚀 hello"


def output_of(text: str | bytes) -> list[list[int]]:
    return [[token_id] for token_id in byte_ids(TOKENIZER, text)]


@pytest.mark.parametrize("prompt", [HARD_PROMPT, TOKENIZER.encode(HARD_PROMPT)])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_prompt_comes_first_streamed_and_whole(prompt: Any, logprobs: int | None) -> None:
    """The prompt is missing, comes twice, or is not what was sent."""
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs}
    whole = post(ScriptedBackend(output_of("é!")), COMPLETIONS, **body)
    assert whole["choices"][0]["text"] == HARD_PROMPT + "é!"
    events = post_stream(ScriptedBackend(output_of("é!")), COMPLETIONS, **body)
    assert text_of(events) == HARD_PROMPT + "é!"
    assert events[0]["choices"][0]["text"].startswith(HARD_PROMPT)
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("echo", [False, True])
def test_a_prompt_that_ends_within_a_character_is_completed_by_the_output(
    logprobs: int | None, echo: bool
) -> None:
    """The prompt comes back without echo, or with it the split character is broken or doubled."""
    raw = "Hello world 🌶!".encode()
    for cut in (2, 3, 4):
        prompt = byte_ids(TOKENIZER, raw[:-cut])
        backend = ScriptedBackend(output_of(raw[-cut:]))
        answer = post(backend, COMPLETIONS, prompt=prompt, echo=echo, logprobs=logprobs, n=2)
        wanted = "Hello world 🌶!" if echo else "🌶!"
        assert [choice["text"] for choice in answer["choices"]] == [wanted] * 2


@pytest.mark.parametrize("prompt", ["客 hello", TOKENIZER.encode("客 hello")])
def test_logprobs_cover_the_prompt_and_the_output(prompt: Any) -> None:
    """The prompt's logprobs are missing or shifted, its first token has one, or offsets do not
    point into the echoed text.
    """
    backend = ScriptedBackend(output_of("ab"))
    answer = post(backend, COMPLETIONS, prompt=prompt, echo=True, logprobs=1)["choices"][0]
    rows = answer["logprobs"]
    assert backend.requests[0].sampling_params.num_prompt_logprobs == 1
    ids = [*TOKENIZER.encode("客 hello"), *byte_ids(TOKENIZER, "ab")]
    assert rows["tokens"] == [TOKENIZER.token_name(token_id) for token_id in ids]
    assert rows["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
    assert rows["top_logprobs"][0] is None
    assert {len(values) for values in rows.values()} == {len(ids)}
    offsets = rows["text_offset"]
    assert offsets == sorted(offsets) and offsets[-2:] == [len("客 hello"), len("客 hello") + 1]
    for token, offset in zip(rows["tokens"][3:], offsets[3:], strict=True):
        assert answer["text"].startswith(token, offset)
    streamed = post_stream(
        ScriptedBackend(output_of("ab")), COMPLETIONS, prompt=prompt, echo=True, logprobs=1
    )
    parts = [event["choices"][0]["logprobs"] for event in streamed[:-1]]
    assert {key: [value for part in parts for value in part[key]] for key in rows} == rows


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored(stream: bool) -> None:
    """max_tokens 0 with echo, by which evaluations score a text, is refused, or adds a token of the
    model's to the text or the usage."""
    backend = ScriptedBackend(output_of("a"))
    body = {"prompt": "客 hello", "echo": True, "logprobs": 1, "max_tokens": 0}
    ids = TOKENIZER.encode("客 hello")
    if stream:
        *events, _ = post_stream(
            backend, COMPLETIONS, stream_options={"include_usage": True}, **body
        )
        choices = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        tokens = [name for choice in choices for name in choice["logprobs"]["tokens"]]
        end, usage = choices[-1]["finish_reason"], events[-1]["usage"]
    else:
        answer = post(backend, COMPLETIONS, **body)
        (choice,) = answer["choices"]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
        end, usage = choice["finish_reason"], answer["usage"]
    assert (text, end) == ("客 hello", "length")
    assert tokens == [TOKENIZER.token_name(token_id) for token_id in ids]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 0)


def test_no_tokens_without_echo_are_refused() -> None:
    """A request for nothing is answered with nothing."""
    backend = ScriptedBackend(output_of("a"))
    error_of(client_of(backend).post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0}), 400)


def test_without_echo_no_prompt_logprobs_are_asked_for() -> None:
    """Every request with logprobs pays for logits of its whole prompt."""
    for body in ({"logprobs": 1}, {"echo": True}):
        backend = ScriptedBackend([[65]])
        post(backend, COMPLETIONS, prompt="hello", **body)
        assert backend.requests[0].sampling_params.num_prompt_logprobs is None


def test_a_stop_string_of_the_prompt_ends_nothing() -> None:
    """Stop strings are looked for in the echoed prompt."""
    backend = ScriptedBackend(output_of("a.b"))
    answer = post(backend, COMPLETIONS, prompt="x.y", echo=True, stop=".")
    assert answer["choices"][0]["text"] == "x.ya"


def test_a_refused_request_echoes_nothing() -> None:
    """The prompt is sent as a 200 before the engine has taken the request."""
    backend = ScriptedBackend(error=ErrorInfo(ErrorKind.OVERLOADED, "told"))
    body = {"prompt": "hello", "echo": True, "stream": True}
    error_of(client_of(backend).post(COMPLETIONS, json=body), 503)
