"""What every section of the configuration is: frozen, and strict about its keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def nearest_name(name: str, known: list[str]) -> str:
    """A hint naming the known key closest to `name`, or all known keys when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(sorted(known))}"


class Section(BaseModel):
    """A part of the tree: frozen, and an unknown key is an error that names the nearest known
    one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = list(cls.model_fields)
            for key in data:
                if key not in known:
                    raise ValueError(f"unknown key '{key}'; {nearest_name(str(key), known)}")
        return data
