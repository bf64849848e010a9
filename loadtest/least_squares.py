"""Least squares with coefficients that cannot be negative, robust against outliers; numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OUTLIER_ERROR = 0.05
"""Relative errors well beyond this count by their size, not by its square."""
NUM_REWEIGHTINGS = 8
_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and what they leave: the robust sum of squared relative errors."""

    coefficients: Array  # [num_features]
    loss: float


def solve_nonnegative(gram: Array, moment: Array) -> Array:
    """The x >= 0 that minimises x'Gx - 2m'x (Bro and De Jong, FNNLS, J. Chemometrics 11, 1997).

    Args:
        gram: G, [n, n], features by features.
        moment: m, [n], features by values.
    """
    size = len(moment)
    x, is_free = np.zeros(size), np.zeros(size, dtype=bool)
    for _ in range(10 * size):
        slope = np.where(is_free, -np.inf, moment - gram @ x)
        if slope.max() <= _TOLERANCE * max(1.0, float(np.abs(moment).max())):
            break
        is_free[slope.argmax()] = True
        x = _solve_free(gram, moment, x, is_free)
    return x


def _solve_free(gram: Array, moment: Array, x: Array, is_free: NDArray[np.bool_]) -> Array:
    """Solve for the free coefficients; those that would become negative are held at 0 again."""
    while True:
        trial = np.zeros(len(x))
        inner = gram[np.ix_(is_free, is_free)]
        trial[is_free] = np.linalg.lstsq(inner, moment[is_free], rcond=None)[0]
        blocking = is_free & (trial <= 0.0)
        if not blocking.any():
            return trial
        gaps = x[blocking] - trial[blocking]
        step = np.divide(x[blocking], gaps, out=np.zeros(len(gaps)), where=gaps > 0).min()
        x = x + step * (trial - x)
        is_free &= x > _TOLERANCE
        x[~is_free] = 0.0
        if not is_free.any():
            return x


def fit_relative(features: Array, values: Array) -> Fit:
    """Coefficients >= 0 whose products with the features come close to `values`, by the relative
    error. Values far from all others lose their weight (soft L1).

    Args:
        features: [num_rows, num_features], none negative.
        values: [num_rows], all positive.
    """
    rows = features / values[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-300)
    rows = rows / scale
    weights = np.ones(len(values))
    for _ in range(NUM_REWEIGHTINGS):
        weighted = rows * weights[:, None]
        x = solve_nonnegative(weighted.T @ rows, weighted.sum(axis=0))
        errors = (rows @ x - 1.0) / OUTLIER_ERROR
        weights = 1.0 / np.sqrt(1.0 + errors**2)
    loss = float((2.0 * (np.sqrt(1.0 + errors**2) - 1.0)).sum()) * OUTLIER_ERROR**2
    return Fit(x / scale, loss)
