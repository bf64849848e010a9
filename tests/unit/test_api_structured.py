"""The fields that ask for structured output become one grammar, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_doubles import ScriptedBackend, client_of, error_of, post

from deployments.protocol import ErrorInfo, ErrorKind, Grammar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (COMPLETIONS, {"prompt": "hi"}),
]
SCHEMA = {"type": "object", "properties": {"名": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
WRAPPED = {"name": "x", "schema": SCHEMA, "strict": True}

ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    (
        {"response_format": {"type": "json_schema", "json_schema": WRAPPED}},
        Grammar("json_schema", SCHEMA_TEXT),
    ),
    ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"guided_regex": "a|b"}, Grammar("regex", "a|b")),
    ({"guided_choice": ["ja", "いいえ"]}, Grammar("choice", '["ja", "いいえ"]')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"structured_outputs": {}}, None),
]


@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize("fields, wanted", ASKED, ids=str)
def test_each_field_becomes_its_grammar(
    path: str, body: dict[str, Any], fields: dict[str, Any], wanted: Grammar | None
) -> None:
    """A structure that was asked for is dropped on the way to the engine."""
    backend = ScriptedBackend([[65]])
    post(backend, path, **body, **fields)
    assert backend.requests[0].sampling_params.grammar == wanted


@pytest.mark.parametrize("path, body", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": "json_object"},
        {"guided_json": "{"},
        {"guided_json": "[]"},
        {"guided_json": '{"const": "\\ud800"}'},
        {"guided_json": 5},
        {"guided_json": {"x": "y" * 70_000}},
        {"guided_regex": ["a"]},
        {"guided_regex": "é" * 33_000},
        {"guided_choice": []},
        {"guided_choice": "a"},
        {"structured_outputs": {"grammar": "root ::= 'a'"}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_is_no_structure_is_named(
    path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """A schema of the wrong type or of megabytes reaches the engine, or is a 500."""
    backend = ScriptedBackend([[65]])
    (name,) = fields
    error = error_of(client_of(backend).post(path, json=body | fields), 400)
    assert error["param"] == name and backend.requests == []


def test_two_structures_are_one_too_many() -> None:
    """Of two structures one is silently ignored."""
    both = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    answer = client_of(ScriptedBackend([[65]])).post(COMPLETIONS, json={"prompt": "hi"} | both)
    assert error_of(answer, 400)["param"] == "guided_regex"


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_a_replicas_refusal_is_in_the_clients_words(fields: dict[str, Any], name: str) -> None:
    """A schema the engine cannot follow is reported under a name the client never wrote."""
    refusal = ErrorInfo(ErrorKind.INVALID, "grammar is no regular expression", "grammar")
    answer = client_of(ScriptedBackend(error=refusal)).post(
        COMPLETIONS, json={"prompt": "hi"} | fields
    )
    error = error_of(answer, 400)
    assert (error["param"], error["message"]) == (name, f"{name} is no regular expression")
