"""The OpenAI contract of answers, streamed and not (faults B05, B08, B23, B25, B29, B32)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from api_doubles import (
    ScriptedBackend,
    byte_ids,
    client_of,
    finishes_of,
    make_tokenizer,
    post,
    post_stream,
    text_of,
)
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    TokenChunk,
)
from serve_app.answer_models import ChatChunk, CompletionChunk

TOKENIZER = make_tokenizer()
HARD_TEXT = "ďábel 🌶️ 客单价 👩‍🚀"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def one_by_one(text: str) -> list[list[int]]:
    return [[token_id] for token_id in byte_ids(TOKENIZER, text)]


@pytest.mark.parametrize("body", [{}, {"logprobs": 2}])
def test_a_streamed_completion_is_the_whole_one_in_pieces(body: dict[str, Any]) -> None:
    """Streamed and whole answers differ in text, or a half character is streamed."""
    script = one_by_one(HARD_TEXT)
    whole = post(ScriptedBackend(script), "/v1/completions", prompt="hello", **body)
    events = post_stream(ScriptedBackend(script), "/v1/completions", prompt="hello", **body)
    Completion.model_validate(whole)
    assert text_of(events) == whole["choices"][0]["text"] == HARD_TEXT
    assert not any(
        "\ufffd" in choice["text"] for event in events[:-1] for choice in event["choices"]
    )
    assert events[-1] == "data: [DONE]"
    assert finishes_of(events) == [None] * (len(events) - 2) + ["stop"]


def test_a_streamed_chat_opens_with_the_role_and_ends_once() -> None:
    """finish_reason is missing in a chunk, or the first chat chunk lacks the role."""
    backend = ScriptedBackend(one_by_one("hi"), FinishReason.LENGTH)
    events = post_stream(backend, "/v1/chat/completions", **CHAT)
    for event in events[:-1]:
        ChatCompletionChunk.model_validate(event)
        assert "usage" not in event
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finishes_of(events) == [None] * (len(events) - 2) + ["length"]
    assert text_of(events) == "hi"
    assert len({event["id"] for event in events[:-1]}) == 1


def test_a_whole_chat_renders_the_template_and_counts_tokens() -> None:
    """The prompt is not what the chat template makes of the messages, or usage miscounts."""
    backend = ScriptedBackend(one_by_one("hi"), num_cached_tokens=4)
    answer = ChatCompletion.model_validate(post(backend, "/v1/chat/completions", **CHAT))
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (request,) = backend.requests
    assert list(request.prompt_token_ids) == TOKENIZER.encode(prompt)
    assert request.sampling_params.max_tokens == 64 - len(request.prompt_token_ids)
    assert answer.choices[0].message.content == "hi"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (
        2,
        4,
    )
    assert answer.id.startswith("chatcmpl-")


def test_a_system_prompt_may_be_parts_and_called_developer() -> None:
    """Content as a list of text parts reaches the template as a list it cannot print."""
    backend = ScriptedBackend(one_by_one("hi"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    post(backend, "/v1/chat/completions", messages=[{"role": "developer", "content": parts}])
    prompt = "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert list(backend.requests[0].prompt_token_ids) == TOKENIZER.encode(prompt)


@pytest.mark.parametrize(
    "path, body", [("completions", {"prompt": "hello"}), ("chat/completions", CHAT)]
)
def test_usage_comes_in_a_last_chunk_without_choices(path: str, body: dict[str, Any]) -> None:
    """include_usage gives no usage, or other chunks lack their `usage: null`."""
    backend = ScriptedBackend(one_by_one("hi"))
    events = post_stream(backend, f"/v1/{path}", stream_options={"include_usage": True}, **body)
    *chunks, usage, done = events
    assert done == "data: [DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    num_prompt_tokens = len(backend.requests[0].prompt_token_ids)
    assert usage["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": num_prompt_tokens + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("includes", [False, True])
def test_events_are_what_the_openapi_page_says(includes: bool) -> None:
    """The page tells another shape of events than clients get."""
    options = {"stream_options": {"include_usage": includes}, "n": 2}
    script = one_by_one("hi")
    for event in post_stream(
        ScriptedBackend(script), "/v1/completions", prompt="hello", logprobs=1, echo=True, **options
    )[:-1]:
        CompletionChunk.model_validate(event, strict=True)
    for event in post_stream(
        ScriptedBackend(script), "/v1/chat/completions", logprobs=True, **CHAT, **options
    )[:-1]:
        ChatChunk.model_validate(event, strict=True)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_stop_string_ends_the_text_the_count_and_the_request(grouped: bool) -> None:
    """Text after a stop string is sent, or the engine goes on with a request whose answer has
    ended.
    """
    ids = [i for text in ("AB", "CDE", "hello") for i in TOKENIZER.encode(text)]
    assert len(ids) == 3
    script = [ids] if grouped else [[i] for i in ids]
    whole_backend = ScriptedBackend(script, hangs=True)
    whole = post(whole_backend, "/v1/completions", prompt="hello", stop=["zz", "BCD"])
    stream_backend = ScriptedBackend(script, hangs=True)
    events = post_stream(stream_backend, "/v1/completions", prompt="hello", stop=["zz", "BCD"])
    assert text_of(events) == whole["choices"][0]["text"] == "A"
    assert finishes_of(events)[-1] == whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 2
    assert (whole_backend.num_closed, stream_backend.num_closed) == (1, 1)


def test_the_token_that_ends_a_text_is_none_of_it() -> None:
    """A stop token that is no special token shows up as the last word of the answer."""

    class EndsWithStopToken(ScriptedBackend):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            ids = TOKENIZER.encode("hello time")
            yield TokenChunk(request.request_id, ids[:1])
            yield TokenChunk(request.request_id, ids[1:], finish_reason=FinishReason.STOP)

    answer = post(EndsWithStopToken(), "/v1/completions", prompt="hello")
    assert len(TOKENIZER.encode("hello time")) == 2
    assert answer["choices"][0]["text"] == "hello"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stop_string_waits_for_min_tokens() -> None:
    """A stop string ends an answer that is to have at least so many tokens."""
    script = one_by_one("a.b.c.")
    body = {"prompt": "hello", "stop": ".", "max_tokens": 9}
    answers = [
        post(ScriptedBackend(script), "/v1/completions", **body, min_tokens=least)
        for least in (0, 2, 3)
    ]
    assert [answer["choices"][0]["text"] for answer in answers] == ["a", "a.b", "a.b"]


def test_a_special_token_as_stop_string_becomes_a_stop_token() -> None:
    """A stop string that is a special token never matches, because special tokens show no text."""
    backend = ScriptedBackend(one_by_one("hi"))
    post(backend, "/v1/completions", prompt="hello", stop=["<|im_end|>"], stop_token_ids=[5])
    end = TOKENIZER.special_token_id("<|im_end|>")
    assert backend.requests[0].sampling_params.stop_token_ids == (5, end)


def test_text_that_only_began_a_stop_string_is_sent_at_the_end() -> None:
    """Text held back for a stop string is lost when the answer ends first."""
    answer = post(
        ScriptedBackend(one_by_one("hixy")), "/v1/completions", prompt="hello", stop="xyz"
    )
    assert answer["choices"][0]["text"] == "hixy"


def test_completion_logprobs_have_one_entry_a_token() -> None:
    """Logprob arrays differ in length, hold infinity, or text_offset runs backwards."""
    end = TOKENIZER.special_token_id("<|im_end|>")
    assert end is not None
    script = [*one_by_one("客!"), [end]]
    body = {"prompt": "hello", "logprobs": 2}
    whole = post(ScriptedBackend(script), "/v1/completions", **body)["choices"][0]["logprobs"]
    assert whole["tokens"] == ["bytes:\\xe5", "bytes:\\xae", "bytes:\\xa2", "!", "<|im_end|>"]
    assert whole["token_logprobs"] == [-0.5] * 5
    # Two alternatives, and always the sampled token.
    for token, top in zip(whole["tokens"], whole["top_logprobs"], strict=True):
        assert token in top
        assert sorted(top.values())[:2] == [-9999.0] * 2
    assert whole["text_offset"] == [0, 0, 0, 1, 2]
    events = post_stream(ScriptedBackend(script), "/v1/completions", **body)
    rows = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    for key, values in whole.items():
        assert [value for row in rows for value in row[key]] == values


def test_no_alternatives_is_not_no_logprobs() -> None:
    """logprobs 0 gives null instead of the sampled token's logprob."""
    answer = post(ScriptedBackend(one_by_one("a")), "/v1/completions", prompt="hello", logprobs=0)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{}]


@pytest.mark.parametrize(
    "top, wanted", [({}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 2}, 2)]
)
def test_chat_logprobs_carry_the_bytes_of_the_text(top: dict[str, Any], wanted: int) -> None:
    """chat logprobs without top_logprobs fail, or their bytes do not make up the text."""
    backend = ScriptedBackend(one_by_one(HARD_TEXT))
    answer = post(backend, "/v1/chat/completions", logprobs=True, **top, **CHAT)
    ChatCompletion.model_validate(answer)
    rows = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == HARD_TEXT
    assert all(len(row["top_logprobs"]) == wanted for row in rows)


def test_a_failure_before_the_first_text_is_a_status_in_a_stream_too() -> None:
    """With stream, a refusal comes back as 200 with the error among the events."""
    for kind, status in [
        (ErrorKind.INVALID, 400),
        (ErrorKind.CONTEXT_LENGTH, 400),
        (ErrorKind.OVERLOADED, 503),
        (ErrorKind.UNAVAILABLE, 503),
        (ErrorKind.ENGINE, 500),
    ]:
        for stream in (False, True):
            backend = ScriptedBackend(error=ErrorInfo(kind, "told"))
            answer = client_of(backend).post(
                "/v1/completions", json={"prompt": "hi", "stream": stream}
            )
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, "told")
            assert ("retry-after" in answer.headers) == (status == 503)
            assert backend.num_closed == 1


def test_a_failure_after_the_first_text_is_one_error_event() -> None:
    """A stream that fails ends in silence, in a false finish_reason or in [DONE]."""
    failing = [
        ScriptedBackend(one_by_one("hi"), error=ErrorInfo(ErrorKind.ENGINE, "told")),
        ScriptedBackend(one_by_one("hi"), finish_reason=FinishReason.ABORT),
        ScriptedBackend(one_by_one("hi"), raises=RuntimeError("secret")),
    ]
    for backend in failing:
        answer = client_of(backend).post("/v1/completions", json={"prompt": "hi", "stream": True})
        *events, rest = answer.text.split("\n\n")
        assert rest == "" and "secret" not in answer.text and "[DONE]" not in answer.text
        *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
        assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [
            None
        ] * 2
        assert backend.num_closed == 1


def test_an_answer_that_breaks_off_is_no_success() -> None:
    """A token stream that ends without a finish_reason is passed on as a finished answer."""

    class BreaksOff(ScriptedBackend):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            async for chunk in super().generate(request):
                if chunk.finish_reason is None:
                    yield chunk

    answer = client_of(BreaksOff(one_by_one("hi"))).post("/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 500
