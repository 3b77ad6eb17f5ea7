"""Fits Amdahl's law and the universal scalability law to measured speeds, and extrapolates to larger sizes. Pure.

    X(n) = l n / (1 + s (n - 1) + k n (n - 1))

n: size over the first one; l: speed of the first size; s: contention (Amdahl's serial share); k: coherency, 0 in
Amdahl's law. N. J. Gunther, Guerrilla Capacity Planning, 2007, chapter 4; s and k are not negative. n / X is linear in
(1, n - 1, n (n - 1)) / l, so the fit is a weighted linear one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from seatrial.scale.statistics import Estimate, t_quantile

Law = Literal["Amdahl", "universal scalability law"]

LEAST_SIZES = 3
_TERMS: dict[Law, int] = {"Amdahl": 2, "universal scalability law": 3}
_DRAWS = 400
_LEAST_VARIANCE = 1e-8  # relative; keeps weights finite when repeats are equal


@dataclass(frozen=True)
class Range:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """One fitted law. `efficiency`: size relative to the first -> tokens/s/GPU relative to the first."""

    law: Law
    contention: Range
    coherency: Range | None  # None: not part of the law
    worst: float  # largest relative residual
    efficiency: tuple[tuple[float, Range], ...]


def fit(law: Law, sizes: Sequence[float], speeds: Sequence[Estimate], at: Sequence[float]) -> Fit | None:
    """`law` for `speeds` at `sizes` (the first is 1), with its efficiency at the sizes `at`.

    None with fewer than three sizes, or if a speed has no interval. The intervals come from 400 fits to speeds
    drawn from the measured intervals: they cover measurement noise, not the error of the law itself.
    """
    variances = [s.relative_variance for s in speeds]
    if len(sizes) < LEAST_SIZES or any(v is None for v in variances):
        return None
    n = np.asarray(sizes, dtype=float)
    x = np.asarray([s.mean for s in speeds])
    sd = np.sqrt(np.maximum(np.asarray(variances, dtype=float), _LEAST_VARIANCE))
    best = _solve(law, n, x, sd)
    random = np.random.default_rng(0)
    # Normal widened to Student's t: the spread of few repeats is uncertain.
    wide = sd * np.asarray([t_quantile(s.degrees) / 1.960 for s in speeds])
    drawn = [_solve(law, n, x * np.exp(random.normal(0, wide)), sd) for _ in range(_DRAWS)]
    worst = float(np.max(np.abs(_speed(best, n) / x - 1)))

    def interval(value: float, values: Sequence[float]) -> Range:
        low, high = np.quantile(np.asarray(values), (0.025, 0.975))
        return Range(value, min(float(low), value), max(float(high), value))

    larger = tuple((m, interval(_efficiency(best, m), [_efficiency(d, m) for d in drawn])) for m in at)
    coherency = interval(best[2], [d[2] for d in drawn]) if _TERMS[law] == 3 else None
    return Fit(law, interval(best[1], [d[1] for d in drawn]), coherency, worst, larger)


def _solve(law: Law, n: np.ndarray, x: np.ndarray, relative: np.ndarray) -> tuple[float, float, float]:
    """(l, s, k) with s, k >= 0: the best of the least-squares solutions with any of s and k at 0."""
    columns = [np.ones_like(n), n - 1, n * (n - 1)][: _TERMS[law]]
    y = n / x
    weight = 1 / (y * relative)
    best, best_rss = (1.0, 0.0, 0.0), np.inf
    for size in range(len(columns)):
        for free in itertools.combinations(range(1, len(columns)), size):
            kept = [0, *free]
            matrix = np.stack([columns[i] for i in kept], axis=1) * weight[:, None]
            found, *_ = np.linalg.lstsq(matrix, y * weight, rcond=None)
            rss = float(np.sum((matrix @ found - y * weight) ** 2))
            if found[0] > 0 and np.all(found[1:] >= 0) and rss < best_rss:
                values = dict(zip(kept, found / found[0], strict=True))
                best, best_rss = (float(1 / found[0]), values.get(1, 0.0), values.get(2, 0.0)), rss
    return best


def _speed(law: tuple[float, float, float], n: np.ndarray) -> np.ndarray:
    speed, s, k = law
    return np.asarray(speed * n / (1 + s * (n - 1) + k * n * (n - 1)))


def _efficiency(law: tuple[float, float, float], n: float) -> float:
    return 1 / (1 + law[1] * (n - 1) + law[2] * n * (n - 1))
