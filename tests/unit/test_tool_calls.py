"""Tool calls in text: the same calls and the same text however it arrives in pieces."""

from __future__ import annotations

import json
import random

import pytest

from serve_app.tool_calls import (
    FirstCallAlone,
    JsonToolCalls,
    NamedToolCall,
    TaggedToolCalls,
    ToolCallParser,
)

NAMES = {"weather", "time"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
OTHER = '<tool_call>{"name":"time","arguments":{}}</tool_call>'
WEATHER, TIME = ("weather", {"city": "東京"}), ("time", {})


def read(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parsed = [parser.push(piece) for piece in pieces] + [parser.flush()]
    calls = [call for part in parsed for call in part.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    text = "".join(part.text for part in parsed)
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


TAGGED = [
    ("hello", ("hello", [])),
    ("  hello \n", ("  hello \n", [])),
    (CALL, ("", [WEATHER])),
    (f"Let me see.\n\n{CALL}\n{OTHER}\n", ("Let me see.", [WEATHER, TIME])),
    (f"{CALL}\n done", ("done", [WEATHER])),
    # The end of the answer stands for the closing tag, where the JSON is complete.
    (CALL.removesuffix("</tool_call>"), ("", [WEATHER])),
    # What is no call stays text, to the letter.
    ("a <tool_call>{]</tool_call> b", ("a <tool_call>{]</tool_call> b", [])),
    (f"a <tool_call>{{]</tool_call> {OTHER}", ("a <tool_call>{]</tool_call>", [TIME])),
    (OTHER.replace("time", "bomb"), (OTHER.replace("time", "bomb"), [])),
    (OTHER.replace("{}", "[1]"), (OTHER.replace("{}", "[1]"), [])),
    ("x <tool_call>{", ("x <tool_call>{", [])),
    ("a < b <tool", ("a < b <tool", [])),
    ("</tool_call> x", ("</tool_call> x", [])),
]


@pytest.mark.parametrize("text, wanted", TAGGED, ids=lambda value: str(value)[:30])
def test_tagged_calls_are_found_in_any_pieces(text: str, wanted: object) -> None:
    """A call is lost, shown as text, or found only if its tags arrive whole."""
    rng = random.Random(5)
    assert read(TaggedToolCalls(NAMES), [text]) == wanted
    assert read(TaggedToolCalls(NAMES), list(text)) == wanted
    for _ in range(50):
        ends = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert read(TaggedToolCalls(NAMES), pieces) == wanted


def test_text_before_a_call_is_shown_at_once() -> None:
    """With tools nothing is streamed until the end."""
    parser = TaggedToolCalls(NAMES)
    assert parser.push("Let me see").text == "Let me see"
    assert parser.push(" <b>").text == " <b>"


JSON = [
    ("hello {", ("hello {", [])),
    ('{"name": "weather", "parameters": {"city": "東京"}}', ("", [WEATHER])),
    ('[{"name": "time"}, {"name": "time"}]', ("", [TIME, TIME])),
    ('{"name": "bomb", "parameters": {}}', ('{"name": "bomb", "parameters": {}}', [])),
    ('{"a": 1}', ('{"a": 1}', [])),
    ('{"name": "ti', ('{"name": "ti', [])),
    ("[]", ("[]", [])),
]  # fmt: skip


@pytest.mark.parametrize("text, wanted", JSON, ids=lambda value: str(value)[:30])
def test_an_answer_of_json_is_calls_or_text(text: str, wanted: object) -> None:
    """JSON that is no call is lost, or a call among text is taken for one."""
    assert read(JsonToolCalls(NAMES), [text]) == wanted
    assert read(JsonToolCalls(NAMES), list(text)) == wanted


def test_the_chosen_function_gets_the_whole_answer() -> None:
    """The arguments of a function the client chose come as text, or broken JSON as arguments."""
    assert read(NamedToolCall("weather"), ['{"city":', ' "東京"}']) == ("", [WEATHER])
    assert read(NamedToolCall("weather"), ['{"city":']) == ('{"city":', [])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_client_that_takes_one_call_gets_the_first(size: int) -> None:
    """parallel_tool_calls false is ignored: a client that runs one tool a turn gets two."""
    call = '<tool_call>{"name": "f", "arguments": {"x": %d}}</tool_call>'
    text = "so " + call % 1 + call % 2
    parser = FirstCallAlone(TaggedToolCalls({"f"}))
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(parser.flush())
    assert "".join(part.text for part in parts) == "so"
    (found,) = [each for part in parts for each in part.calls]
    assert json.loads(found.arguments) == {"x": 1}


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"c": "\\ud800"}}',
        '{"name": "f", "arguments": {"\\ud800": 1}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e400}}',
        '{"name": ["f"], "arguments": {}}',
        '{"name": {"f": 1}, "arguments": {}}',
        '{"name": "f", "arguments": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
    ],
)
@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_call_that_is_no_json_is_text(call: str, is_tagged: bool) -> None:
    """B32: what a model wrote cannot be sent as JSON: a 500 after the whole generation, or a stream
    that breaks off without an error."""
    text = f"<tool_call>{call}</tool_call>" if is_tagged else call
    parser = TaggedToolCalls({"f"}) if is_tagged else JsonToolCalls({"f"})
    parts = [parser.push(text), parser.flush()]
    assert "".join(part.text for part in parts) == text
    assert not any(part.calls for part in parts)
