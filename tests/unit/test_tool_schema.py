"""The schema of an answer that must be tool calls."""

from __future__ import annotations

from typing import Any

import jsonschema

from serve_app.tool_schema import calls_schema

CITY = {
    "type": "object",
    "$defs": {"City": {"type": "string", "minLength": 1}},
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "children": {"type": "array", "items": {"$ref": "#"}},
        "$ref": {"type": "string"},
        "const": {"$ref": "#/definitions/Size"},
    },
    "definitions": {"Size": {"type": "integer"}},
    "additionalProperties": False,
}
MARK = {"properties": {"mark": {"const": {"$ref": "#/not/a/reference"}}}, "required": ["mark"]}
SCHEMA = calls_schema([("weather", CITY), ("plant", TREE), ("mark", MARK)], None)


def is_valid(*calls: tuple[str, Any], schema: dict[str, Any] = SCHEMA) -> bool:
    answer = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return bool(jsonschema.Draft202012Validator(schema).is_valid(answer))


def test_references_of_each_tool_lead_to_its_own_definitions() -> None:
    """Tools whose parameters hold $ref and $defs, as pydantic writes them, are refused as a
    reference that leads nowhere, or one tool's definition stands for another's.
    """
    assert is_valid(("weather", {"city": "Oslo"}))
    assert not is_valid(("weather", {"city": ""}))
    assert not is_valid(("weather", {"children": []}))
    assert is_valid(("plant", {"children": [{"children": []}, {"const": 3}]}))
    assert not is_valid(("plant", {"children": [{"city": "Oslo"}]}))
    assert not is_valid(("plant", {"const": "tall"}))


def test_what_only_looks_like_a_reference_is_left_alone() -> None:
    """A property that is called $ref, or a constant that holds one, is rewritten."""
    assert is_valid(("plant", {"$ref": "#/x"}))
    assert is_valid(("mark", {"mark": {"$ref": "#/not/a/reference"}}))
    assert not is_valid(("mark", {"mark": {"$ref": "#/$defs/2/not/a/reference"}}))


def test_a_bound_on_the_calls_holds() -> None:
    """No call is enough for "required", or several pass where one is wanted."""
    one = calls_schema([("weather", CITY)], 1)
    call = ("weather", {"city": "Oslo"})
    assert is_valid(call, schema=one) and is_valid(call, call)
    assert not is_valid(call, call, schema=one) and not is_valid()
