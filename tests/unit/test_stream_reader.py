"""What a streamed answer says of its tokens, whatever the server counts and however bytes come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.stream_reader import AnswerFault, AnswerReader, SseLines, StreamedAnswer, TokenCount


def text_event(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None, **more.pop("choice", {})}
    return {"choices": [choice], **more}


def read(*events: dict[str, Any] | bytes) -> StreamedAnswer:
    """The answer whose n-th event arrives at second n."""
    reader = AnswerReader()
    for second, event in enumerate(events, start=1):
        payload = event if isinstance(event, bytes) else json.dumps(event).encode()
        reader.push(payload, float(second))
    return reader.finish()


def usage(num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 9, "completion_tokens": num_tokens, **more}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_do_not_depend_on_how_bytes_are_cut(size: int, newline: bytes) -> None:
    """An event is lost, doubled or joined where the network cut it."""
    stream = b"".join(
        line + newline
        for line in (b": ping", b"", b"data: one", b"", b"event: x", b"data:two", b"data: 2", b"")
    )
    lines = SseLines()
    found = [
        payload
        for start in range(0, len(stream), size)
        for payload in lines.push(stream[start : start + size])
    ]
    assert found == [b"one", b"two\n2"]


def test_an_event_with_k_tokens_counts_k_times_by_its_usage() -> None:
    """Tokens that came together count once, or one without text is forgotten."""
    answer = read(
        text_event("", usage=usage(0)),
        text_event("a", usage=usage(1)),
        text_event("bcd", usage=usage(4)),
        {"choices": [], "usage": usage(5, prompt_tokens_details={"cached_tokens": 3})},
        b"[DONE]",
    )
    assert list(answer.token_times_s) == [2.0, 3.0, 3.0, 3.0, 3.0]
    assert answer.counted_by is TokenCount.USAGE
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (9, 3)


def test_logprobs_count_the_tokens_of_an_event() -> None:
    """Without a running usage, an event with two logprobs is taken for one token."""
    two = {"tokens": ["a", "b"], "token_logprobs": [0.0, 0.0]}
    answer = read(
        text_event("ab", choice={"logprobs": two}),
        text_event("cd", choice={"logprobs": two, "finish_reason": "length"}),
    )
    assert list(answer.token_times_s) == [1.0, 1.0, 2.0, 2.0]
    assert answer.counted_by is TokenCount.LOGPROBS


@pytest.mark.parametrize(
    ("num_tokens", "times_s"),
    [(3, [1.0, 2.0, 3.0]), (6, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]), (4, [1.0, 1.0, 2.0, 3.0])],
)
def test_a_last_usage_is_spread_over_the_events(num_tokens: int, times_s: list[float]) -> None:
    """The number of tokens is that of the events, though the server says another."""
    events = [text_event("ab") for _ in range(3)]
    answer = read(*events, {"choices": [], "usage": usage(num_tokens)}, b"[DONE]")
    assert list(answer.token_times_s) == times_s
    is_confirmed = num_tokens == 3
    assert answer.counted_by is (
        TokenCount.CONFIRMED_EVENTS if is_confirmed else TokenCount.SCALED_EVENTS
    )


def test_chats_open_with_a_role_that_is_no_token() -> None:
    """The first token's time is that of the role."""
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "a"}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    assert list(read(*chunks, b"[DONE]").token_times_s) == [2.0, 3.0]


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    """Servers that send no [DONE] are all broken."""
    answer = read(text_event("a", choice={"finish_reason": "stop"}))
    assert list(answer.token_times_s) == [1.0]


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([text_event("a")], "broken stream"),
        ([], "broken stream"),
        ([text_event("a"), {"error": {"message": "no more"}}], "error event"),
        ([b"<html>"], "not OpenAI's shape"),
        ([{"token": "a"}], "not OpenAI's shape"),
        ([{"choices": [{"message": {"content": "a"}}]}], "not OpenAI's shape"),
        ([b"[DONE]"], "not OpenAI's shape"),
    ],
)
def test_faults_are_told_by_kind(events: list[dict[str, Any] | bytes], kind: str) -> None:
    """A broken answer passes for a whole one, or for broken in another way."""
    with pytest.raises(AnswerFault) as fault:
        read(*events)
    assert fault.value.kind == kind
