"""Where studies keep their results: JSON with the date, machine and command that made it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.provenance import keep_result, origin

RESULTS_DIR = Path("loadtest/results")


def add_result_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Where to write to."""
    parser.add_argument(
        "--save-result",
        type=Path,
        default=RESULTS_DIR / f"study_{name}.json",
        help="the result's file",
    )


def tell(progress: str) -> None:
    """One line for whoever waits; a study takes minutes."""
    print(progress, file=sys.stderr, flush=True)


def tell_and_keep(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures with what made them, and print them."""
    result = {**origin(), **figures}
    keep_result(path, result)
    print(json.dumps(result, indent=1))
