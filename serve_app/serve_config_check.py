"""Checks a configuration file before Serve reads it, because Serve ignores the keys it does not
know.

Accepts a Serve config, a bare service tree, or the scheduler's keys alone. Starts nothing.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.config import ConfigError, nearest_name, parse_service_config, read_yaml

IMPORT_PATH = "serve_app.app:build_app"
"""The application whose `args` are a service tree."""


def check_serve_config(path: Path) -> list[str]:
    """All that is wrong with a file, one line each, with the place and what to change; empty if it
    can be used.
    """
    try:
        data = read_yaml(path)
    except ConfigError as error:
        return [" ".join(str(error).split())]
    if isinstance(data, Mapping) and _is_serve_config(data):
        return [f"{path}: {fault}" for fault in _serve_faults(data)]
    return _args_faults(data, str(path))


def _is_serve_config(data: Mapping[str, Any]) -> bool:
    # A misspelled 'applications' still shows by its neighbours.
    return bool(set(data) & set(ServeDeploySchema.model_fields))


def _serve_faults(data: Mapping[str, Any]) -> list[str]:
    faults = list(_unknown_keys(data, ServeDeploySchema, ""))
    faults += _value_faults(data)
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, Mapping) and application.get("import_path") == IMPORT_PATH:
            faults += _args_faults(application.get("args"), f"applications.{index}.args")
    return faults


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


def _args_faults(args: Any, place: str) -> list[str]:
    try:
        parse_service_config(args, place)
    except ConfigError as error:
        return str(error).splitlines()
    return []
