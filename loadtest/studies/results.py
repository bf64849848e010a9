"""Where studies keep their results: JSON with the date, machine and command that made it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.provenance import origin

RESULTS_DIR = Path("loadtest/results")


def add_result_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Where to write to."""
    parser.add_argument(
        "--save-result",
        type=Path,
        default=RESULTS_DIR / f"study_{name}.json",
        help="the result's file",
    )


def keep_result(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures with what made them, and print them."""
    text = json.dumps({**origin(), **figures}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)
