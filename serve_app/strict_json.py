"""JSON that stands within a string: what a model or a client wrote as the arguments of a tool."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json


def read_json(text: str) -> Any:
    """The value of a JSON text that can be written out again as JSON.

    Raises:
        ValueError: it is none: not JSON, nested too deep, half a surrogate pair, or a number that
            is none or too large for a double. Python's own reader takes the last three.
    """
    value = from_json(text, allow_inf_nan=False)
    try:
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value
