"""The pages about load tests name every flag that there is, and none that there is not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from serve_app.cli import build_parser
from tests.unit.test_cli import parsers_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "bench load": ("load-client.md", "load-tests.md"),
    "bench capacity": ("load-client.md", "load-tests.md"),
    "bench ceiling": ("load-client.md",),
    "bench chunking": ("load-client.md",),
    "bench quality": ("load-client.md",),
    "bench own-cost": ("load-client.md",),
    "trace describe": ("load-tests.md",),
    "trace convert": ("load-tests.md",),
    "trace synthesize": ("load-tests.md",),
    "simulate": ("simulator.md", "load-tests.md"),
    "calibrate": ("simulator.md",),
    "plan": ("planning.md", "load-tests.md"),
    "report": ("planning.md",),
}
# Of other programs, in examples.
FOREIGN = {
    "--tokenizer-mode", "--endpoint-type", "--streaming", "--url", "--request-count",
    "--synthetic-input-tokens-mean", "--synthetic-input-tokens-stddev", "--output-tokens-mean",
    "--output-tokens-stddev", "--arrival-pattern", "--extra-inputs",
}  # fmt: skip
# Not `--mix-…`, which stands for several.
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![-\w])")


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Long names; of a switch and its `--no-` form the first is enough."""
    names = {
        name
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.dest != "help"
    }
    return {name for name in names if not (name.startswith("--no-") and f"--{name[5:]}" in names)}


def told_in(pages: tuple[str, ...]) -> set[str]:
    return {flag for page in pages for flag in FLAG.findall((DOCS / page).read_text("utf-8"))}


@pytest.mark.parametrize("words", PAGES)
def test_every_flag_stands_on_its_page(words: str) -> None:
    """A flag is added, or renamed, and nobody who reads the page can know of it."""
    assert flags_of(parsers_of(build_parser())[words]) - told_in(PAGES[words]) == set()


def test_no_page_names_a_flag_that_is_gone() -> None:
    """A reader types what the page says, and is told that there is no such flag."""
    known = {name for parser in parsers_of(build_parser()).values() for name in flags_of(parser)}
    known |= {f"--no-{name[2:]}" for name in known}
    for page in {page for pages in PAGES.values() for page in pages}:
        assert told_in((page,)) - known - FOREIGN == set(), page


def test_every_benchmark_stands_on_the_page_of_the_client() -> None:
    """A benchmark is there, and who reads about measuring never hears of it."""
    page = (DOCS / "load-client.md").read_text("utf-8")
    commands = {
        f"chunkserve {name}" for name in parsers_of(build_parser()) if name.startswith("bench ")
    }
    assert commands and [name for name in sorted(commands) if f"`{name}`" not in page] == []
