"""Numbers of command lines that have to lie within bounds; `argparse` tells what is wrong of them,
in one line, before anything runs.

    parser.add_argument("--seconds", type=positive_number, default=5.0)
    parser.add_argument("--rounds", type=whole_number(0), default=3)
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def positive_number(text: str) -> float:
    """A finite number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def finite_number(text: str) -> float:
    """Any number but inf and nan, which no JSON can say.

    Raises:
        ArgumentTypeError: it is none.
    """
    value = _number(text)
    if not math.isfinite(value):
        raise ArgumentTypeError(f"must be a number, not {text!r}")
    return value


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """What reads a whole number of at least `least`, and at most `most`; it raises
    ArgumentTypeError for others.
    """
    bounds = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"must be a whole number of {bounds}, not {text!r}")
        return value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
