"""The command line: commands cost nothing until they are called, and mistakes are one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli import build_parser, main
from serve_app.command_parser import CommandParser

PROBE = """
import json, sys
from serve_app.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("\\n" + json.dumps(sorted(sys.modules)))
"""
HEAVY = {"torch", "transformers", "ray", "aiohttp", "numpy", "tokenizers", "matplotlib"}


def modules_after(*words: str) -> set[str]:
    """What a process has imported once a command has run."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def parsers_of(parser: argparse.ArgumentParser, *names: str) -> dict[str, CommandParser]:
    """All commands below a parser, loaded, by what is typed."""
    assert isinstance(parser, CommandParser)
    parser.load()
    found = {" ".join(names): parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found |= parsers_of(below, *names, name)
    return found


@pytest.mark.parametrize("words", [("--help",), ("bench", "--help"), ("bench", "load", "--nix")])
def test_the_list_of_commands_imports_none_of_them(words: tuple[str, ...]) -> None:
    """Every command waits for the imports of all others."""
    found = modules_after(*words)
    wanted = {"loadtest.bench_load"} if "load" in words else set()
    assert {name for name in found if name.startswith("loadtest.bench")} == wanted
    assert not found & ({"torch", "ray", "matplotlib"} if wanted else HEAVY)


def test_a_service_tree_is_checked_without_ray(tmp_path: Path) -> None:
    """A look at ten lines of YAML imports Ray, a second's work."""
    config = tmp_path / "service.yaml"
    config.write_text("scheduler: {chunk_size: 256}\n")
    found = modules_after("check", str(config))
    assert "deployments.config" in found
    assert not found & HEAVY


def test_a_trace_is_described_without_a_client(tmp_path: Path) -> None:
    """A command imports what another one needs."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    found = modules_after("trace", "describe", str(trace))
    assert "loadtest.trace_tool" in found
    assert not found & {"torch", "ray", "aiohttp", "tokenizers", "matplotlib"}


def test_every_command_loads_and_says_what_it_does() -> None:
    """A command names a module that is not there, or its help shows nothing but flags."""
    found = parsers_of(build_parser())
    assert len(found) > 20
    for words, parser in found.items():
        text = parser.format_help()
        assert words == "" or len(text.splitlines()) > 3
    for words in ("bench load", "bench capacity", "simulate", "plan", "calibrate", "report"):
        assert found[words].description


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nix",), "invalid choice: 'nix'"),
        (("bench",), "arguments are required: kind"),
        (
            ("bench", "load", "--num-prompts", "many"),
            "--num-prompts: must be a whole number of 1 to 100,000,000, not 'many'",
        ),
        (("trace", "convert", "a"), "arguments are required: output"),
        (("simulate", "a.jsonl", "--policy", "fast"), "--policy: invalid choice: 'fast'"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_help_is(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one line that matters stands below forty lines of usage."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in told and told.count("\n") == 1 and "--help" in told


def test_a_file_that_cannot_be_written_is_told_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result of hours cannot be kept, which is found out after them; or the line that says so
    begins with a number.
    """
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    words = ("simulate", str(trace), "--cost-model", "h100-llama3-8b", "--save-result")
    assert main([*words, str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err == f"error: {tmp_path}: Is a directory\n" and told.out == ""
    assert main([*words, str(trace / "result.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_is_a_word_and_not_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while a command is imported ends in a traceback."""

    def interrupt(parser: CommandParser) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommandParser, "load", interrupt)
    assert main(["trace", "describe", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
