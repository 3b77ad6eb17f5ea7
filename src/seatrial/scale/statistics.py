"""Means with 95 % confidence intervals, their ratios, and detection of the warm-up. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
# Two-sided 95 % quantiles of Student's t by degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods,
# section 1.3.6.7.2. Between them, linear in 1 / degrees.
_T = (
    (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
    (10, 2.228), (12, 2.179), (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980), (math.inf, 1.960),
)  # fmt: skip
_OUTLIER = 5.0  # robust standard deviations at which outliers are clipped
_MAD = 1.4826  # of a normal distribution: standard deviation / median absolute deviation
_LEAST_STEADY = 4


@dataclass(frozen=True)
class Estimate:
    """A positive mean and its 95 % interval; `low` and `high` are None with a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int
    relative_variance: float | None  # variance of the mean / mean^2
    degrees: float  # degrees of freedom of that variance

    @property
    def half(self) -> float | None:
        """Half the width of the interval, relative to the mean; None if there is no interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / self.mean


def t_quantile(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t; `degrees` of freedom >= 1."""
    if degrees < 1:
        raise ValueError(f"no t distribution of {degrees} degrees of freedom")
    above = next(i for i, (d, _) in enumerate(_T) if d >= degrees)
    d1, t1 = _T[above]
    if d1 == degrees:
        return t1
    d0, t0 = _T[above - 1]
    share = (1 / d0 - 1 / degrees) / (1 / d0 - 1 / d1)
    return t0 + share * (t1 - t0)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent, positive `values`; ValueError for none.

    Its t interval is that of the logarithm (delta method), so it stays positive, as `ratio`'s does.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"no estimate from {values}")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, None, 1, None, math.nan)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n / mean**2
    factor = math.exp(t_quantile(n - 1) * math.sqrt(variance))
    return Estimate(mean, mean / factor, mean * factor, n, variance, n - 1)


def ratio(above: Estimate, below: Estimate, factor: float = 1.0) -> Estimate:
    """`factor` x above / below for independent means, by the delta method on the logarithm.

    The degrees of freedom are Welch and Satterthwaite's.
    """
    mean, n = factor * above.mean / below.mean, min(above.n, below.n)
    a, b = above.relative_variance, below.relative_variance
    if a is None or b is None:
        return Estimate(mean, None, None, n, None, math.nan)
    degrees = (a + b) ** 2 / (a**2 / above.degrees + b**2 / below.degrees) if a + b > 0 else math.inf
    half = t_quantile(degrees) * math.sqrt(a + b)
    return Estimate(mean, mean * math.exp(-half), mean * math.exp(half), n, a + b, degrees)


def warm_up(step_times: Sequence[float]) -> int:
    """The number of warm-up steps: the first, and further ones that differ from the rest; at most half of all.

    The first step allocates, connects and compiles; a single step is not always distinguishable from noise. The rest is searched
    for the least-squares change point of the logarithms, accepted if the Bayesian information criterion is better with it
    than without; then again in what is left, since a warm-up may have several stages. Outliers, relative to the second
    half, are clipped to five standard deviations.
    """
    n = len(step_times)
    if n < 2 * _LEAST_STEADY:
        raise ValueError(f"{n} steps are too few to see a warm-up")
    logs = np.log(np.asarray(step_times, dtype=float))
    rest = logs[n // 2 :]
    middle = float(np.median(rest))
    spread = max(_MAD * float(np.median(np.abs(rest - middle))), 1e-4)  # 0.01 %: no timer is better
    values = np.clip((logs - middle) / spread, -_OUTLIER, _OUTLIER)
    cut = 1
    while (more := _change_point(values[cut:], n // 2 - cut)) > 0:
        cut += more
    return cut


def _change_point(values: np.ndarray, most: int) -> int:
    """The best k of 1..`most` at which the mean of `values` changes; 0 if none is better than no change."""
    n = len(values)
    best, best_rss = 0, math.inf
    for k in range(1, min(most, n - _LEAST_STEADY) + 1):
        rss = float(k * np.var(values[:k]) + (n - k) * np.var(values[k:]))
        if rss < best_rss:
            best, best_rss = k, rss
    if best == 0:
        return 0
    # Two extra parameters: position and second mean. Variance at least that of a unit spread, see `warm_up`.
    floor = n * 1e-2
    gain = n * math.log(max(n * float(np.var(values)), floor) / max(best_rss, floor))
    return best if gain > 2 * math.log(n) else 0
