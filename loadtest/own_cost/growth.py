"""How a cost grows with the number of running requests: a straight line, and how far off it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """cost of a step = fixed_us + us_per_request * num_running."""

    fixed_us: float
    us_per_request: float
    worst_deviation: float
    """The largest distance of a measured cost from the line, as a share of the line."""

    def at(self, num_running: int) -> float:
        """The line's cost of a step, in microseconds."""
        return self.fixed_us + self.us_per_request * num_running


def fit_line(costs_us: Mapping[int, float]) -> Line:
    """The line through costs of a step, in microseconds, by number of running requests.

    Least squares of the relative errors, so that a step of one request counts as much as one of a
    thousand.

    Raises:
        ValueError: fewer than two sizes: no line is known by one point.
    """
    if len(costs_us) < 2:
        raise ValueError("a line needs two sizes at least; measure one more")
    sizes = np.array(list(costs_us), dtype=float)
    costs = np.array(list(costs_us.values()), dtype=float)
    features = np.stack([1.0 / costs, sizes / costs], axis=1)
    fixed_us, us_per_request = np.linalg.lstsq(features, np.ones(len(sizes)), rcond=None)[0]
    line = fixed_us + us_per_request * sizes
    return Line(
        float(fixed_us), float(us_per_request), float(np.max(np.abs(costs - line) / np.abs(line)))
    )
