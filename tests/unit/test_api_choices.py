"""Several prompts and several choices in one request: order, usage, seeds, one end (public faults
B20, B22, B25, B28, B43), and the client's deadline.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from api_doubles import (
    ScriptedBackend,
    choices_of,
    client_of,
    error_of,
    finishes_of,
    make_tokenizer,
    post,
    post_stream,
    text_of,
)

from deployments.protocol import ErrorInfo, ErrorKind, FinishReason, GenerateRequest, TokenChunk
from serve_app.choices import Answer, ChoiceDelta
from serve_app.streaming import TextDelta

TOKENIZER = make_tokenizer()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def script_of(*texts: str) -> list[list[list[int]]]:
    return [[[token_id] for token_id in TOKENIZER.encode(text)] for text in texts]


@pytest.mark.parametrize(
    "prompts", [["hello", " time"], [TOKENIZER.encode("hello"), TOKENIZER.encode(" time")]]
)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_choices_are_numbered_by_prompt_then_choice(prompts: Any, logprobs: int | None) -> None:
    """Answers come back under another prompt's index, or differ streamed and whole, or a choice
    ends twice or never.
    """
    texts = ["a", "bb", "hello time", "客"]
    body = {"prompt": prompts, "n": 2, "logprobs": logprobs}
    whole_backend = ScriptedBackend(outputs=script_of(*texts))
    whole = post(whole_backend, COMPLETIONS, **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == texts
    sent = [list(request.prompt_token_ids) for request in whole_backend.requests]
    ids = [TOKENIZER.encode(text) for text in ("hello", "hello", " time", " time")]
    assert sent == ids
    assert len({request.request_id for request in whole_backend.requests}) == 4

    events = post_stream(ScriptedBackend(outputs=script_of(*texts)), COMPLETIONS, **body)
    assert [text_of(events, index) for index in range(4)] == texts
    for index in range(4):
        *middle, last = finishes_of(events, index)
        assert last == "stop" and set(middle) <= {None}
    assert events[-1] == "data: [DONE]"


def test_each_choice_of_a_streamed_chat_opens_with_the_role_and_ends_once() -> None:
    """Only the first of several choices says whose turn it is, or an end is missing."""
    events = post_stream(ScriptedBackend(outputs=script_of("a", "bb", "c")), CHAT, n=3, **HI)
    for index, parts in choices_of(events).items():
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
            len(parts) - 1
        )
        assert text_of(events, index) == ["a", "bb", "c"][index]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]


def test_choices_of_a_stream_are_interleaved_as_they_come() -> None:
    """A choice waits until the one before it has ended."""

    class TakesTurns(ScriptedBackend):
        """The second choice ends before the first one begins."""

        ended = asyncio.Event()

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            is_first = not self.requests
            self.requests.append(request)
            if is_first:
                await self.ended.wait()
            try:
                yield TokenChunk(request.request_id, TOKENIZER.encode("hello"))
                yield TokenChunk(request.request_id, finish_reason=FinishReason.LENGTH)
            finally:
                self.ended.set()

    events = post_stream(TakesTurns(), COMPLETIONS, prompt="hello", n=2)
    order = [choice["index"] for event in events[:-1] for choice in event["choices"]]
    assert order == [1, 1, 0, 0]


def test_usage_counts_each_prompt_once_and_sums_what_was_cached() -> None:
    """cached_tokens of several prompts are those of the last one, or a prompt counts once for each
    of its choices.
    """

    class Caches(ScriptedBackend):
        """The n-th request found so many cached tokens."""

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            self.requests.append(request)
            cached = [4, 5, 0, 3, 2, 8][len(self.requests) - 1]
            yield TokenChunk(request.request_id, [65], num_cached_tokens=cached)
            yield TokenChunk(
                request.request_id, finish_reason=FinishReason.STOP, num_cached_tokens=cached
            )

    body = {"prompt": [[1] * 10, [2] * 20, [3] * 30], "n": 2}
    wanted = {
        "prompt_tokens": 60,
        "completion_tokens": 6,
        "total_tokens": 66,
        # The second choice of a prompt may find what the first one left.
        "prompt_tokens_details": {"cached_tokens": 4 + 0 + 2},
    }
    assert post(Caches(), COMPLETIONS, **body)["usage"] == wanted
    events = post_stream(Caches(), COMPLETIONS, stream_options={"include_usage": True}, **body)
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 2) + [wanted]


def test_seeded_choices_differ_and_repeat() -> None:
    """With a seed all choices are the same, or they differ from run to run, or the first one is
    not what n=1 gives.
    """

    def seeds(**body: Any) -> list[int | None]:
        backend = ScriptedBackend([[65]])
        post(backend, COMPLETIONS, **body)
        return [request.sampling_params.seed for request in backend.requests]

    found = seeds(prompt=["hello", " time"], n=3, seed=42)
    assert found[0] == 42 and len(set(found[:3])) == 3
    assert found[:3] == found[3:] == seeds(prompt="hello", n=3, seed=42)
    assert seeds(prompt="hello", n=3, seed=43)[1:] != found[1:3]
    assert all(-(2**63) <= (seed or 0) < 2**63 for seed in found)
    assert seeds(prompt="hello", n=2) == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_refused_before_anything_was_sent_is_a_status(stream: bool) -> None:
    """One of several choices fails and the request still looks like a success, or the others run
    on.
    """

    class RefusesSecond(ScriptedBackend):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            self.requests.append(request)
            try:
                if len(self.requests) == 2:
                    info = ErrorInfo(ErrorKind.OVERLOADED, "told")
                    yield TokenChunk(
                        request.request_id, finish_reason=FinishReason.ERROR, error=info
                    )
                await asyncio.Event().wait()
            finally:
                self.num_closed += 1

    backend = RefusesSecond()
    answer = client_of(backend).post(COMPLETIONS, json={"prompt": "hi", "n": 3, "stream": stream})
    assert error_of(answer, 503)["message"] == "told"
    assert (len(backend.requests), backend.num_closed) == (3, 3)


def test_a_choice_that_fails_later_is_one_error_event_and_ends_the_others() -> None:
    """After an error of one choice the others go on, or each reports it."""

    class FailsSecond(ScriptedBackend):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            self.requests.append(request)
            is_second = len(self.requests) == 2
            try:
                yield TokenChunk(request.request_id, [65])
                if not is_second:
                    await asyncio.Event().wait()
                info = ErrorInfo(ErrorKind.ENGINE, "told")
                yield TokenChunk(request.request_id, finish_reason=FinishReason.ERROR, error=info)
            finally:
                self.num_closed += 1

    backend = FailsSecond()
    events = post_stream(backend, COMPLETIONS, prompt="hi", n=3)
    assert [event.get("error", {}).get("message") for event in events].count("told") == 1
    assert events[-1]["error"]["message"] == "told"
    assert backend.num_closed == 3
    finishes = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert set(finishes) == {None}


def test_many_choices_are_refused_before_they_cost_anything() -> None:
    """512 answers to each of 100 prompts reach the engine, or fill the memory."""
    backend = ScriptedBackend([[65]])
    client = client_of(backend)
    for body in ({"n": 512}, {"n": 100}, {"n": 100000}):
        error = error_of(client.post(COMPLETIONS, json={"prompt": ["a"] * 100} | body), 400)
        assert error["param"] == "n"
    assert backend.requests == []
    assert client.post(COMPLETIONS, json={"prompt": ["a"] * 100, "n": 2}).status_code == 200


# --- the client's deadline ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_deadline_before_the_first_text_is_a_408(stream: bool, n: int) -> None:
    """A request outlives its timeout, or runs on in the engine after its client was told."""
    backend = ScriptedBackend(hangs=True)
    body = {"prompt": "hi", "timeout": 0.05, "stream": stream, "n": n}
    error = error_of(client_of(backend).post(COMPLETIONS, json=body), 408)
    assert (error["code"], error["param"]) == ("timeout", "timeout")
    assert backend.num_closed == len(backend.requests) == n


def test_a_deadline_within_a_stream_is_one_error_event() -> None:
    """A stream whose time is up ends in silence or in a false finish_reason."""
    backend = ScriptedBackend([TOKENIZER.encode("hello")], hangs=True)
    client = client_of(backend)
    # Loading the tokenizer counts, too, and takes its time.
    assert client.get("/ready").status_code == 200
    answer = client.post(CHAT, json={"stream": True, "timeout": 1.0, **HI})
    assert answer.status_code == 200, answer.text
    *_, text, error, rest = answer.text.split("\n\n")
    assert json.loads(text[6:])["choices"][0]["delta"] == {"content": "hello"}
    assert json.loads(error[6:])["error"]["code"] == "timeout"
    assert (rest, backend.num_closed) == ("", 1)


def test_a_deadline_that_holds_changes_nothing() -> None:
    """A request that is done in time is cut, or its answer differs."""
    bodies = [{"prompt": "hi", "n": 2}, {"prompt": "hi", "n": 2, "timeout": 60}]
    answers = [post(ScriptedBackend([[65]]), COMPLETIONS, **body) for body in bodies]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_a_deadline_holds_for_tokens_that_never_pause() -> None:
    """A deadline is noticed only while nothing comes."""

    async def scenario() -> ChoiceDelta:
        async def endless() -> AsyncGenerator[TextDelta, None]:
            while True:
                yield TextDelta("a")

        loop = asyncio.get_running_loop()
        answer = Answer([endless()], [1], loop.time() + 0.05)
        *_, last = [choice async for choice in answer]
        await answer.aclose()
        return last

    last = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert last.delta.error is not None and last.delta.error.kind is ErrorKind.TIMEOUT


def test_an_error_is_the_last_delta_of_an_answer() -> None:
    """After one choice failed, the others are read on."""

    async def scenario() -> list[int]:
        async def choice(index: int) -> AsyncGenerator[TextDelta, None]:
            if index == 1:
                yield TextDelta(error=ErrorInfo(ErrorKind.ENGINE, "told"))
            for _ in range(5):
                await asyncio.sleep(0)
            yield TextDelta("a", finish_reason=FinishReason.STOP)

        answer = Answer([choice(index) for index in range(3)], [1])
        indices = [part.index async for part in answer]
        await answer.aclose()
        return indices

    assert asyncio.run(scenario()) == [1]


def test_an_answer_is_closed_once_with_all_its_choices() -> None:
    """Choices that nobody read yet stay open when the answer is closed."""

    async def scenario() -> tuple[int, int]:
        backend = ScriptedBackend([[65]], hangs=True)
        closed: list[int] = []

        async def choice(index: int) -> AsyncGenerator[TextDelta, None]:
            try:
                yield TextDelta("a")
                await asyncio.Event().wait()
            finally:
                closed.append(index)

        answer = Answer([choice(index) for index in range(3)], [1])
        await anext(answer)
        await answer.aclose()
        await answer.aclose()
        return len(closed), backend.num_closed

    assert asyncio.run(scenario()) == (3, 0)
