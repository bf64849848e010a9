"""Files stay short enough to read at once, functions short enough to see at once."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("deployments", "serve_app", "loadtest", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def long_functions(source: str) -> list[str]:
    """Names and lengths of functions that are too long."""
    return [
        f"{node.name} ({length} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_no_file_is_longer_than_400_lines() -> None:
    """A file has grown beyond one idea."""
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert lengths
    assert {str(path): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    """A function has grown beyond one thought."""
    found = {str(path): long_functions(path.read_text()) for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_long_function_is_found() -> None:
    """The limit on functions holds for none, or for those within a class or another function
    not.
    """
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
    assert long_functions(f"async def f():\n{body}") == ["f (61 lines)"]
    inner = body.replace("    x", "        x")
    assert long_functions(f"class C:\n    def g(self):\n{inner}") == ["g (61 lines)"]
    assert long_functions("def f():\n" + body.rsplit("\n", 1)[0]) == []
