"""Numbers on command lines: what is out of bounds is told before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.number_types import finite_number, positive_number, whole_number
from serve_app.cli import main


def test_numbers_within_bounds_are_read() -> None:
    """A number that is fine is refused, or becomes another one."""
    assert positive_number("0.5") == 0.5 and finite_number("-1e3") == -1000.0
    assert whole_number(0)("0") == 0 and whole_number(1, 5)("5") == 5


@pytest.mark.parametrize(
    "line",
    [
        "bench ceiling --seconds nan",
        "bench ceiling --seconds -1",
        "bench ceiling --streams 0",
        "bench soak --seconds nan",
        "bench soak --streams 0",
        "bench stall --tokens -5",
        "bench serve --seconds inf",
        "bench serve --rounds 0",
        "bench forward --threads -1",
        "bench engine --rounds 0",
        "bench engine --tokens 0",
        "bench quality --windows -1",
        "bench quality --threads 0",
        "bench own-cost --sizes 0 1",
        "bench peers --rounds 0",
        "bench peers --scale nan",
        "bench load --temperature nan",
        "bench load --num-prompts 0",
        "bench load --num-prompts 99999999999999",
        "simulate x.jsonl --cost-model h100-llama3-8b --replicas 9999999999",
        "simulate x.jsonl --cost-model h100-llama3-8b --num-blocks 99999999999999",
        "simulate x.jsonl --cost-model h100-llama3-8b --replicas 0",
        "plan --trace x.jsonl --max-replicas 0",
        "plan --trace x.jsonl --max-replicas 9999999999",
        "plan --trace x.jsonl --budgets 9999999999999999999",
    ],
)
def test_a_number_out_of_bounds_ends_in_one_line(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark that cannot work starts servers first, runs for ever, or ends in a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    told = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and len(told) == 1 and "must be" in told[0]
