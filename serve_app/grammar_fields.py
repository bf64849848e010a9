"""The fields that ask for structured output, OpenAI's and vLLM's, and the grammar each stands for.

Owns types and size. Whether a schema or an expression can be followed is the engine's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.protocol import Grammar, RequestRefused
from serve_app.api_base import ApiModel
from serve_app.strict_json import read_json

MAX_GRAMMAR_BYTES = 64 * 1024

Schema = dict[str, Any] | str
"""A JSON schema, as an object or as its JSON text."""
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class JsonSchema(ApiModel):
    """OpenAI's wrapping of a schema; `name` and `strict` change nothing: it is always followed."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_one_is_meant(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("needs json_schema, because its type is json_schema")
        return self

    def grammar(self, field: str) -> Grammar | None:
        """What the output must look like; None: any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return schema_grammar(field, self.json_schema.schema_)
        return Grammar("json_object", "") if self.type == "json_object" else None


class StructuredOutputs(ApiModel):
    """vLLM's `structured_outputs`: one of its fields."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        for name in ("grammar", "structural_tag"):
            if isinstance(data, dict) and data.get(name) is not None:
                raise ValueError(f"{name} is not served; send json, regex or choice")
        return data

    def grammars(self, field: str) -> list[Grammar]:
        """All that are asked for; more than one is the client's fault."""
        found = [Grammar("json_object", "")] if self.json_object else []
        found += [] if self.json_ is None else [schema_grammar(field, self.json_)]
        found += [] if self.regex is None else [regex_grammar(field, self.regex)]
        found += [] if self.choice is None else [choice_grammar(field, self.choice)]
        return found


def schema_grammar(field: str, schema: Schema) -> Grammar:
    """The grammar of a JSON schema.

    Raises:
        RequestRefused: it is no JSON object, or too large.
    """
    if isinstance(schema, str):
        schema = _parsed(field, schema)
    return _bounded(field, Grammar("json_schema", json.dumps(schema, ensure_ascii=False)))


def regex_grammar(field: str, regex: str) -> Grammar:
    """The grammar of a regular expression.

    Raises:
        RequestRefused: it is too large.
    """
    return _bounded(field, Grammar("regex", regex))


def choice_grammar(field: str, choices: list[str]) -> Grammar:
    """The grammar of a list of texts, one of which is the output.

    Raises:
        RequestRefused: it is too large.
    """
    return _bounded(field, Grammar("choice", json.dumps(choices, ensure_ascii=False)))


def only_grammar(asked: Mapping[str, list[Grammar]]) -> tuple[str, Grammar] | None:
    """The one grammar asked for and the field that asks for it; None if no field does.

    Raises:
        RequestRefused: there are two; the output cannot follow both.
    """
    found = [(field, grammar) for field, grammars in asked.items() for grammar in grammars]
    if len(found) > 1:
        field, others = found[1][0], found[0][0]
        message = f"{field} asks for a second structure of the output beside {others}; send one"
        raise RequestRefused.invalid(field, message)
    return found[0] if found else None


def _parsed(field: str, text: str) -> dict[str, Any]:
    try:
        schema = read_json(text)
    except ValueError as error:
        message = f"{field} must hold a JSON schema, but is not valid JSON"
        raise RequestRefused.invalid(field, message) from error
    if not isinstance(schema, dict):
        raise RequestRefused.invalid(field, f"{field} must hold a JSON schema, which is an object")
    return schema


def _bounded(field: str, grammar: Grammar) -> Grammar:
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        message = f"{field} has {size} bytes; it may have at most {MAX_GRAMMAR_BYTES}"
        raise RequestRefused.invalid(field, message)
    return grammar
