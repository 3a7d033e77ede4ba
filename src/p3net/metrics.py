"""Counting errors: MAE, RMSE (the field's "MSE") and NAE, with bootstrap intervals.

Shapes: M images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from p3net.errors import InputError
from p3net.randomness import generator

Floats = NDArray[np.float64]


def mae(truth: Floats, counted: Floats) -> float:
    """Mean absolute error.

    >>> mae(np.array([10.0, 0.0]), np.array([13.0, 1.0]))
    2.0
    """
    return float(np.abs(counted - truth).mean())


def rmse(truth: Floats, counted: Floats) -> float:
    """Root of the mean squared error, which the literature on counting calls MSE.

    >>> rmse(np.array([10.0, 0.0]), np.array([11.0, 7.0]))
    5.0
    """
    return float(np.sqrt(np.square(counted - truth).mean()))


def nae(truth: Floats, counted: Floats) -> float:
    """Mean of |error| / truth over the images with people; NaN where there are none.

    >>> nae(np.array([10.0, 0.0]), np.array([13.0, 1.0]))
    0.3
    """
    people = truth > 0
    if not people.any():
        return float("nan")
    return float((np.abs(counted - truth)[people] / truth[people]).mean())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its bootstrap interval."""

    value: float
    low: float
    high: float


METRICS: dict[str, Callable[[Floats, Floats], float]] = {"mae": mae, "rmse": rmse, "nae": nae}


def summarise(
    truth: ArrayLike, counted: ArrayLike, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> dict[str, Estimate]:
    """Every metric with a percentile interval over images drawn with replacement."""
    t, c = np.asarray(truth, np.float64), np.asarray(counted, np.float64)
    if t.shape != c.shape or t.ndim != 1 or not t.size:
        raise InputError(f"two equal, non-empty lists were expected, got {t.shape} and {c.shape}")
    if not (np.isfinite(t).all() and np.isfinite(c).all()):
        raise InputError("counts must be finite numbers")
    picks = generator(seed).integers(0, len(t), (draws, len(t)))
    result = {}
    for name, metric in METRICS.items():
        values = [metric(t[pick], c[pick]) for pick in picks]
        finite = [value for value in values if np.isfinite(value)]
        tails = (50 * (1 - level), 50 * (1 + level))
        low, high = np.percentile(finite, tails) if finite else (np.nan, np.nan)
        result[name] = Estimate(metric(t, c), float(low), float(high))
    return result
