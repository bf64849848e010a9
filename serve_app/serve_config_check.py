"""Checks a configuration file before Serve reads it, because Serve ignores the keys it does not
know.

Accepts a Serve config, a bare service tree, or the scheduler's keys alone. Starts nothing. What
Serve's own schema says of a file is `serve_schema_check`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.config import ConfigError, parse_service_config, read_yaml

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
    faults = _args_faults(data, str(path))
    if not faults or not isinstance(data, Mapping):
        return faults
    # Only now: the schema brings Ray with it, which takes a second.
    from serve_app.serve_schema_check import is_serve_config, schema_faults

    if not is_serve_config(data):
        return faults
    return [f"{path}: {fault}" for fault in (*schema_faults(data), *_application_faults(data))]


def _application_faults(data: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, Mapping) and application.get("import_path") == IMPORT_PATH:
            faults += _args_faults(application.get("args"), f"applications.{index}.args")
    return faults


def _args_faults(args: Any, place: str) -> list[str]:
    try:
        parse_service_config(args, place)
    except ConfigError as error:
        return str(error).splitlines()
    return []
