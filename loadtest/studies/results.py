"""Where studies keep their results: JSON with the command, date and machine that made it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from loadtest.provenance import describe_machine

RESULTS_DIR = Path("loadtest/results")


def add_result_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Where to write to."""
    parser.add_argument(
        "--save-result", type=Path, default=RESULTS_DIR / f"{name}.json", help="the result's file"
    )


def keep_result(path: Path, command: str, figures: Mapping[str, Any]) -> None:
    """Write figures with what made them, and print them."""
    result = {
        "command": command,
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        **figures,
    }
    text = json.dumps(result, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)
