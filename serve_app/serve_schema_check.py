"""What Ray Serve's own schema says of a Serve config: keys that it does not know, and values that
it refuses. Importing this imports Ray.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.config import nearest_name


def is_serve_config(data: Mapping[str, Any]) -> bool:
    """Whether any of its keys is Serve's: a misspelled 'applications' shows by its neighbours."""
    return bool(set(data) & set(ServeDeploySchema.model_fields))


def schema_faults(data: Mapping[str, Any]) -> list[str]:
    """Unknown keys at any depth with the nearest known name, then values that are refused."""
    return [*_unknown_keys(data, ServeDeploySchema, ""), *_value_faults(data)]


def _unknown_keys(data: Any, model: type[BaseModel], place: str) -> Iterator[str]:
    """Keys of plain data that a schema does not have, at any depth it describes."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown_keys(item, model, f"{place}{index}.")
        return
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{place}{key}: unknown key; {nearest_name(str(key), list(model.model_fields))}"
        elif (inner := _model_in(field.annotation)) is not None:
            yield from _unknown_keys(value, inner, f"{place}{key}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The schema a field's type holds, directly, optionally or as items of a list; None for plain
    values.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(part) for part in typing.get_args(annotation))
    return next((model for model in inner if model is not None), None)


def _value_faults(data: Mapping[str, Any]) -> list[str]:
    try:
        ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        # Where the schema forbids unknown keys itself, they were named already, with a hint.
        found = [item for item in error.errors() if item["type"] != "extra_forbidden"]
        places = (".".join(str(part) for part in item["loc"]) for item in found)
        messages = (item["msg"].removeprefix("Value error, ") for item in found)
        return [f"{place}: {message}" for place, message in zip(places, messages, strict=True)]
    except ImportError as error:
        # Policies and routers are imported while the schema is read.
        return [f"a class or function named in the file cannot be imported: {error}"]
    return []
