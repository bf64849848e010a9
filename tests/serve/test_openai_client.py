"""The official client against a real `serve run` of the small real model."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest
from conftest import Service, wait_until

pytestmark = pytest.mark.serve

MODEL = "SmolLM2-135M-Instruct.Q4_1"
RAINBOW = [{"role": "user", "content": "Name three colours of the rainbow."}]


def test_a_completion_continues_the_prompt_and_counts_its_tokens(service: Service) -> None:
    """Text in, text out: greedy text is the same twice, and usage adds up."""
    answers = [
        service.client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
        )
        for _ in range(2)
    ]
    assert "Paris" in answers[0].choices[0].text
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].finish_reason == "length"
    usage = answers[0].usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8


def test_a_chat_uses_the_models_template_and_stops_by_itself(service: Service) -> None:
    """A chat model must see its template: without it, it neither answers nor stops."""
    answer = service.client.chat.completions.create(model=MODEL, messages=RAINBOW, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert "red" in (choice.message.content or "").lower()
    assert "<|im_end|>" not in (choice.message.content or "")


def test_a_streamed_chat_is_the_same_text_as_a_whole_one(service: Service) -> None:
    """Stream and answer must not be two implementations."""
    asked = {"model": MODEL, "messages": RAINBOW, "temperature": 0, "max_tokens": 40}
    whole = service.client.chat.completions.create(**asked)
    stream = service.client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage == whole.usage or (
        chunks[-1].usage is not None
        and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore
    )


def test_a_stop_string_ends_the_text_before_itself(service: Service) -> None:
    """The stop string spans tokens and must not show, streamed or not (fault B05)."""
    asked = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "temperature": 0}
    whole = service.client.completions.create(**asked, stop=["8, 9"]).choices[0]
    streamed = "".join(
        chunk.choices[0].text
        for chunk in service.client.completions.create(**asked, stop=["8, 9"], stream=True)
    )
    assert whole.text == streamed == " 6, 7, "
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_real_status_also_when_streamed(service: Service, stream: bool) -> None:
    """A validation error must not come as HTTP 200 with an error in the stream (fault B22)."""
    create = service.client.completions.create
    with pytest.raises(openai.BadRequestError, match="empty"):
        create(model=MODEL, prompt="", stream=stream)
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model=MODEL, prompt=[5] * 9000, stream=stream)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        create(model=MODEL, prompt=[10**6], stream=stream)
    with pytest.raises(openai.NotFoundError, match="nope"):
        create(model="nope", prompt="a", stream=stream)
    assert create(model=MODEL, prompt="a", max_tokens=1).choices[0].finish_reason == "length"


def test_a_disconnect_frees_every_block(service: Service) -> None:
    """A client that leaves mid-stream must not leave its request running."""
    streams = [
        service.client.completions.create(
            model=MODEL,
            prompt=[7 + index] * 40,
            max_tokens=250,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for index in range(6)
    ]
    for stream in streams:
        next(iter(stream))
    assert service.stats()["num_running"] > 0
    before = service.stats()["num_finished"].get("abort", 0)  # type: ignore[attr-defined]
    for stream in streams:
        stream.close()
    wait_until(service.is_idle, 30, "all blocks are free after the disconnects")
    after = service.stats()["num_finished"]["abort"]  # type: ignore[index]
    assert after - before == len(streams)


def test_a_disconnect_of_an_unstreamed_request_frees_it_too(service: Service) -> None:
    """Whoever waits for a whole answer may leave as well."""

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{service.url}/v1/completions",
                json={"prompt": "a", "max_tokens": 3000, "ignore_eos": True},
                timeout=3.0,
            )

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: service.stats()["num_running"] == 1, 30, "the request runs")
    asking.join()
    wait_until(service.is_idle, 30, "it is gone after its client")


def test_short_chats_go_on_beside_a_long_prompt(service: Service) -> None:
    """A long prompt shares its steps with decodes: everybody ends, with the text they get alone."""
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    alone = service.client.completions.create(**asked).choices[0].text
    texts: list[str] = []
    chats = [
        threading.Thread(
            target=lambda: texts.append(service.client.completions.create(**asked).choices[0].text)
        )
        for _ in range(4)
    ]
    long = threading.Thread(
        target=lambda: service.client.completions.create(
            model=MODEL, prompt=[11] * 2000, max_tokens=4
        )
    )
    for thread in [long, *chats]:
        thread.start()
    for thread in [long, *chats]:
        thread.join(timeout=120)
    assert texts == [alone] * 4


def test_chunk_shows_windows_and_their_overlap(service: Service) -> None:
    """POST /chunk answers with the spans the scheduler would run."""
    body = {"prompt": "one two three four five six seven eight nine ten", "chunk_size": 4}
    answer = httpx.post(f"{service.url}/chunk", json={**body, "overlap_ratio": 0.25}).json()
    chunks = answer["chunks"]
    assert chunks[0]["start"] == 0 and chunks[-1]["end"] == answer["num_tokens"]
    assert [c["index"] for c in chunks] == list(range(len(chunks)))
    for earlier, later in zip(chunks, chunks[1:], strict=False):
        assert later["start"] == earlier["end"] - later["num_overlap_tokens"]


def test_the_served_model_is_listed(service: Service) -> None:
    """Clients find the model's name by asking."""
    assert [model.id for model in service.client.models.list()] == [MODEL]
