"""Where an answer ends and what of its end is shown, on every path (public faults B05, B07, B08,
B25, B26).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from api_doubles import (
    ScriptedBackend,
    byte_ids,
    finishes_of,
    make_tokenizer,
    post,
    post_stream,
    text_of,
)

from deployments.protocol import FinishReason, GenerateRequest, TokenChunk

TOKENIZER = make_tokenizer()
COMPLETIONS = "/v1/completions"
END = TOKENIZER.special_token_id("<|im_end|>")
START = TOKENIZER.special_token_id("<|im_start|>")
assert END is not None and START is not None


def one_by_one(text: str) -> list[list[int]]:
    return [[token_id] for token_id in byte_ids(TOKENIZER, text)]


def both_texts(output: list[list[int]], **body: Any) -> set[str]:
    """The text whole and streamed, which must be the same."""
    whole = post(ScriptedBackend(output), COMPLETIONS, **body)["choices"][0]
    events = post_stream(ScriptedBackend(output), COMPLETIONS, **body)
    assert finishes_of(events)[-1] == whole["finish_reason"]
    return {whole["text"], text_of(events)}


@pytest.mark.parametrize("prompt", ["hello", TOKENIZER.encode("hello")])
@pytest.mark.parametrize("includes, wanted", [(True, "AB客DEF"), (False, "AB客")])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_stop_string_is_included_once_or_not_at_all(
    prompt: Any, includes: bool, wanted: str, is_grouped: bool
) -> None:
    """include_stop_str_in_output is honoured for texts and ignored for token ids, or only
    without a stream, or the stop string comes twice or with what follows it.
    """
    output = one_by_one("AB客DEFGHDEF")
    if is_grouped:
        output = [[token_id for ids in output for token_id in ids]]
    body = {"prompt": prompt, "stop": ["DEF"], "include_stop_str_in_output": includes}
    assert both_texts(output, **body) == {wanted}


def test_of_two_stops_at_one_place_the_shorter_is_included() -> None:
    """What is included depends on how tokens were grouped."""
    body = {"prompt": "hello", "stop": ["abc", "ab"], "include_stop_str_in_output": True}
    assert both_texts(one_by_one("xabcd"), **body) == {"xab"}
    assert both_texts([byte_ids(TOKENIZER, "xabcd")], **body) == {"xab"}


class StopsAtId(ScriptedBackend):
    """Behaves as an engine does: a stop token ends the request, and is its last token."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        for token_id in [*byte_ids(TOKENIZER, "hé"), END]:
            is_end = token_id in request.sampling_params.stop_token_ids
            reason = FinishReason.STOP if is_end else None
            stop_id = token_id if is_end else None
            yield TokenChunk(
                request.request_id, [token_id], finish_reason=reason, stop_token_id=stop_id
            )


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("includes, wanted", [(False, "hé"), (True, "hé<|im_end|>")])
def test_a_stop_string_that_is_a_special_token_stops(
    skips: bool, includes: bool, wanted: str
) -> None:
    """A special token as stop string never matches, because it is dropped before matching, or the
    characters before it are lost.
    """
    body = {
        "prompt": "hello",
        "stop": ["<|im_end|>"],
        "skip_special_tokens": skips,
        "include_stop_str_in_output": includes,
    }
    whole = post(StopsAtId(), COMPLETIONS, **body)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (wanted, "stop")
    assert text_of(post_stream(StopsAtId(), COMPLETIONS, **body)) == wanted


def test_a_special_stop_token_id_loses_no_text() -> None:
    """The last characters are lost where a stop token id is special."""
    body = {"prompt": "hello", "stop_token_ids": [END]}
    for includes in (False, True):
        answer = post(StopsAtId(), COMPLETIONS, include_stop_str_in_output=includes, **body)
        assert answer["choices"][0]["text"] == "hé"
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("skips, wanted", [(True, "ab"), (False, "a<|im_start|>b")])
def test_special_tokens_show_only_if_asked_for(skips: bool, wanted: str) -> None:
    """skip_special_tokens false changes nothing, or the bytes of logprobs do not make up the
    text.
    """
    output = [byte_ids(TOKENIZER, "a"), [START], byte_ids(TOKENIZER, "b"), [319]]
    assert both_texts(output, prompt="hello", skip_special_tokens=skips) == {wanted}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    answer = post(
        ScriptedBackend(output), "/v1/chat/completions", skip_special_tokens=skips, **chat
    )
    choice = answer["choices"][0]
    shown = bytes(byte for row in choice["logprobs"]["content"] for byte in row["bytes"])
    assert shown.decode() == choice["message"]["content"] == wanted


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_each_choice_has_exactly_one_finish_reason(
    reason: FinishReason, logprobs: int | None, n: int
) -> None:
    """The finish_reason is null until [DONE], missing in middle chunks, or lost with logprobs."""
    backend = ScriptedBackend(one_by_one("abc"), reason)
    events = post_stream(backend, COMPLETIONS, prompt="hello", logprobs=logprobs, n=n)
    for index in range(n):
        *middle, last = finishes_of(events, index)
        assert last == reason.value and middle and set(middle) == {None}


def test_max_tokens_counts_the_output_alone() -> None:
    """A prompt longer than max_tokens gives an empty answer."""
    backend = ScriptedBackend(one_by_one("abcde"), FinishReason.LENGTH)
    answer = post(backend, COMPLETIONS, prompt=[1] * 50, max_tokens=5)
    assert backend.requests[0].sampling_params.max_tokens == 5
    assert answer["choices"][0] == {
        "index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 5
