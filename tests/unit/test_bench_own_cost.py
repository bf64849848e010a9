"""The benchmark of our own cost: its line is the line, and each part is measured and drawn."""

from __future__ import annotations

import pytest

from loadtest.bench_own_cost import draw, table, verdict
from loadtest.own_cost.growth import fit_line


def test_a_straight_cost_is_found_whatever_its_size() -> None:
    """Large sizes alone decide, or a step's fixed part is taken for the requests'."""
    line = fit_line({size: 12.0 + 3.0 * size for size in (1, 16, 64, 256, 1024)})
    assert line.fixed_us == pytest.approx(12.0)
    assert line.us_per_request == pytest.approx(3.0)
    assert line.worst_deviation == pytest.approx(0.0, abs=1e-9)


def test_growth_that_is_not_linear_shows_as_deviation() -> None:
    """A quadratic cost passes for a linear one."""
    line = fit_line({size: 10.0 + size + 0.01 * size**2 for size in (1, 16, 64, 256, 1024)})
    assert line.worst_deviation > 0.5


def test_a_line_needs_two_sizes() -> None:
    """One size gives a line of no meaning."""
    with pytest.raises(ValueError, match="two sizes"):
        fit_line({16: 1.0})


def result_of(us_per_request: float) -> dict[str, object]:
    sizes = (1, 16)
    costs = {"schedule + update": {size: us_per_request * size for size in sizes}}
    return {
        "us_per_step": {part: {str(n): us for n, us in row.items()} for part, row in costs.items()},
        "lines": {
            "schedule + update": {
                "fixed_us": 0.0, "us_per_request": us_per_request, "worst_deviation": 0.0
            }
        },
    }  # fmt: skip


def test_the_table_shows_the_cost_of_a_request() -> None:
    """The table shows whole steps, which nobody can compare between sizes."""
    assert "2.50" in table(result_of(2.5)).splitlines()[1]


def test_the_bound_of_the_scheduler_is_judged_at_each_size() -> None:
    """A cost above the bound passes."""
    assert verdict(result_of(3.9)).endswith("is kept at every size")
    assert "4.1 at 1, 4.1 at 16" in verdict(result_of(4.1))


def test_the_plot_is_a_picture() -> None:
    """Nothing is drawn."""
    assert draw(result_of(2.0)).png.startswith(b"\x89PNG")
