"""The JSON schema of an answer that must be tool calls.

Owns how the schemas of several tools stand in one: each keeps its own definitions.

    {"$defs": {"0": parameters of tool 0, "1": …},
     "type": "array", "items": {"anyOf": [{… "arguments": {"$ref": "#/$defs/0"}}, …]}}

A reference within a tool's schema counts from that schema's root, which is not the root any more,
so it is written anew: `#/$defs/City` of tool 0 becomes `#/$defs/0/$defs/City`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data: a "$ref" in there is no reference."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values hold schemas by names of the client: a name may look like a keyword."""


def calls_schema(tools: Sequence[tuple[str, Json]], max_calls: int | None) -> Json:
    """The schema of a list of at least one call.

    Args:
        tools: name and schema of the arguments of each function.
        max_calls: None is no bound.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"$ref": f"#/$defs/{index}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (name, _) in enumerate(tools)
    ]
    definitions = {
        str(index): _moved(schema, f"#/$defs/{index}") for index, (_, schema) in enumerate(tools)
    }
    bound = {} if max_calls is None else {"maxItems": max_calls}
    items = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return {"$defs": definitions} | items | bound


def _moved(schema: Any, root: str) -> Any:
    """A schema whose root is now at `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, root) for key, value in schema.items()}


def _moved_value(key: str, value: Any, root: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value[1:]
    if key in _NAMED and isinstance(value, dict):
        return {name: _moved(schema, root) for name, schema in value.items()}
    return value if key in _DATA else _moved(value, root)
