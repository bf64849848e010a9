"""Conversations: roles, tools, and how the template is called."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_doubles import (
    ScriptedBackend,
    byte_ids,
    client_of,
    error_of,
    finishes_of,
    make_card,
    make_tokenizer,
    post,
    post_stream,
    text_of,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.config import IngressConfig, ServiceConfig

TOKENIZER = make_tokenizer()
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
HEAD = "{% if tools %}{{ tools | tojson }}{{ hint }}{% endif %}"
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ style }}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TAGGED = HEAD.replace("{{ hint }}", "<tool_call></tool_call>") + TURNS
PLAIN_JSON = HEAD + TURNS
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "東京"}}</tool_call>'


def backend_of(text: str = "", template: str = TAGGED) -> ScriptedBackend:
    output = [[token_id] for token_id in byte_ids(TOKENIZER, text)]
    return ScriptedBackend(output, card=make_card(template, max_model_len=2048))


def prompt_of(backend: ScriptedBackend) -> str:
    return TOKENIZER.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_tools_reach_the_template_and_calls_come_back() -> None:
    """Tools are dropped on the way to the model, or its call is shown as text."""
    backend = backend_of(f"Let me see.\n{CALL}")
    answer = post(backend, CHAT, messages=HI, tools=[WEATHER])
    assert json.loads(prompt_of(backend).partition("<tool_call>")[0]) == [WEATHER]
    choice = ChatCompletion.model_validate(answer).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "東京"}
    alone = post(backend_of(CALL), CHAT, messages=HI, tools=[WEATHER])["choices"][0]
    assert alone["message"]["content"] is None


def test_streamed_calls_are_the_whole_ones() -> None:
    """A streamed call lacks its index or id, its text leaks, or the finish_reason is "stop"."""
    events = post_stream(
        backend_of(f"Let me see.\n{CALL}{CALL}"), CHAT, messages=HI, tools=[WEATHER]
    )
    for event in events[:-1]:
        ChatCompletionChunk.model_validate(event)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert {json.loads(call["function"]["arguments"])["city"] for call in calls} == {"東京"}
    assert text_of(events) == "Let me see."
    assert finishes_of(events) == [None] * (len(deltas) - 1) + ["tool_calls"]


def test_with_tools_plain_text_is_plain_text() -> None:
    """An answer without a call ends with "tool_calls", or its text is held or changed."""
    for choice in ({}, {"tool_choice": "auto"}):
        answer = post(backend_of("a < b\n"), CHAT, messages=HI, tools=[WEATHER], **choice)
        assert answer["choices"][0]["message"]["content"] == "a < b\n"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_tool_choice_none_neither_shows_tools_nor_reads_calls() -> None:
    """A model that must not call tools is shown them, or its text is taken for a call."""
    backend = backend_of(CALL)
    answer = post(backend, CHAT, messages=HI, tools=[WEATHER], tool_choice="none")
    assert prompt_of(backend) == "[user]hi[assistant]"
    assert answer["choices"][0]["message"]["content"] == CALL


def test_a_template_without_tags_has_its_calls_in_json() -> None:
    """The calls of models that answer in bare JSON are not found."""
    call = '{"name": "weather", "parameters": {"city": "東京"}}'
    backend = backend_of(call, PLAIN_JSON)
    answer = post(backend, CHAT, messages=HI, tools=[WEATHER])["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "東京"
    }


def test_a_tool_the_client_insists_on_is_a_structure_of_the_output() -> None:
    """tool_choice required or named is left to the model's mood."""
    backend = backend_of('[{"name": "weather", "arguments": {"city": "東京"}}]')
    answer = post(backend, CHAT, messages=HI, tools=[WEATHER], tool_choice="required")
    grammar = backend.requests[-1].sampling_params.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert json.loads(grammar.text)["minItems"] == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"

    named = {"type": "function", "function": {"name": "weather"}}
    backend = backend_of('{"city": "東京"}')
    answer = post(backend, CHAT, messages=HI, tools=[WEATHER], tool_choice=named)
    grammar = backend.requests[-1].sampling_params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == WEATHER["function"]["parameters"]  # type: ignore[index]
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "東京"}'}
    # As OpenAI: what the client chose is no reason of the model's to end.
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_one_call_is_all_that_a_client_of_single_calls_is_forced_to_take() -> None:
    """The model is made to write several calls, and those after the first are thrown away."""
    backend = backend_of('[{"name": "weather", "arguments": {}}]')
    post(
        backend, CHAT, messages=HI, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    grammar = backend.requests[-1].sampling_params.grammar
    assert grammar is not None and json.loads(grammar.text)["maxItems"] == 1


def test_calls_and_results_of_tools_are_rendered_as_templates_expect() -> None:
    """The arguments of an earlier call reach the template as a string, quoted twice."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"c": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "warm"}], "tool_call_id": "a"},
    ]
    backend = backend_of("ok")
    post(backend, CHAT, messages=messages)
    assert prompt_of(backend) == '[user]hi[assistant]{"c": 1}[tool]warm[assistant]'


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "bomb"}},
            },
            "tool_choice",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversations": []}}, "messages"),
        ({"echo": True}, "echo"),
    ],
    ids=str,
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    """A client brings its own template, or a field that cannot hold is accepted or a 500."""
    answer = client_of(backend_of("x")).post(CHAT, json={"messages": HI} | fields)
    assert error_of(answer, 400)["param"] == param


@pytest.mark.parametrize("template", [TURNS, TAGGED.replace("{{ tools | tojson }}", "")])
def test_a_template_that_knows_no_tools_refuses_them(template: str) -> None:
    """Tools are accepted and silently never shown to the model."""
    answer = client_of(backend_of("x", template)).post(
        CHAT, json={"messages": HI, "tools": [WEATHER]}
    )
    assert error_of(answer, 400)["param"] == "tools"


def test_bad_arguments_of_an_earlier_call_are_the_messages_fault() -> None:
    """A tool call in the history that is not JSON is a 500."""
    call = {"function": {"name": "weather", "arguments": "{"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    answer = client_of(backend_of("x")).post(CHAT, json={"messages": messages})
    assert error_of(answer, 400)["param"] == "messages"


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({}, "[user]hi[assistant]a[assistant]"),
        ({"add_generation_prompt": False}, "[user]hi[assistant]a"),
        ({"continue_final_message": True}, "[user]hi[assistant]a"),
        ({"chat_template_kwargs": {"style": "(brief)"}}, "[user]hi[assistant]a(brief)[assistant]"),
    ],
)
def test_the_end_of_the_prompt_is_as_asked(fields: dict[str, Any], wanted: str) -> None:
    """The model opens a new turn where it was to go on with the last one."""
    backend = backend_of("x")
    post(backend, CHAT, messages=[*HI, {"role": "assistant", "content": "a"}], **fields)
    assert prompt_of(backend) == wanted


@pytest.mark.parametrize("prompt, kept", [("hello time hello", 2), ([1, 2, 3, 4], 3), ("hello", 9)])
def test_truncation_keeps_the_end_of_the_prompt(prompt: Any, kept: int) -> None:
    """truncate_prompt_tokens keeps the beginning, or is counted in characters."""
    backend = backend_of("x")
    answer = post(backend, "/v1/completions", prompt=prompt, truncate_prompt_tokens=kept, echo=True)
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    assert list(backend.requests[0].prompt_token_ids) == ids[-kept:]
    assert answer["usage"]["prompt_tokens"] == len(ids[-kept:])
    assert answer["choices"][0]["text"] == TOKENIZER.decode(ids[-kept:]) + "x"


def test_truncation_to_the_context_leaves_room_for_the_answer() -> None:
    """truncate_prompt_tokens -1 leaves no room for max_tokens, and the answer is empty."""
    backend = backend_of("x")
    body = {"prompt": [1] * 5000, "truncate_prompt_tokens": -1}
    for asked, room in [({}, 16), ({"max_tokens": 100}, 100), ({"max_tokens": 2048}, 2047)]:
        post(backend, "/v1/completions", **body, **asked)
        assert len(backend.requests[-1].prompt_token_ids) == 2048 - room
    post(
        backend, CHAT, messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=-1
    )
    assert len(backend.requests[-1].prompt_token_ids) == 2047


@pytest.mark.parametrize(
    "fields, default, wanted",
    [
        ({}, 0, 0),
        ({}, 3, 3),
        ({"service_tier": "auto"}, 3, 3),
        ({"service_tier": "default"}, 3, 3),
        ({"service_tier": "priority"}, 3, 0),
        ({"service_tier": "flex"}, 3, 4),
        ({"service_tier": "flex", "priority": 1}, 3, 1),
    ],
)
def test_a_service_tier_is_a_priority(fields: dict[str, Any], default: int, wanted: int) -> None:
    """A service tier changes nothing, or outweighs the number the client gave."""
    backend = backend_of("x")
    config = ServiceConfig(ingress=IngressConfig(default_priority=default))
    client = client_of(backend, config)
    assert client.post(CHAT, json={"messages": HI} | fields).status_code == 200
    assert backend.requests[-1].priority == wanted


@pytest.mark.parametrize("arguments", ['{"c":"\\ud800"}', "[" * 900 + "]" * 900, '{"x":NaN}', "{"])
def test_arguments_of_an_earlier_call_that_are_no_json_are_refused(arguments: str) -> None:
    """B19: half a surrogate pair, or deep nesting, in an earlier tool call is a 500."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = client_of(backend_of()).post(CHAT, json={"messages": messages})
    assert "messages" in error_of(answer, 400)["message"]
