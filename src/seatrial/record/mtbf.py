"""Mean time between failures with its interval, from their number in a time of observation: a Poisson process."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Mtbf:
    """Seconds between failures. Without a failure only `low_s` is known, one-sided; without observation nothing is."""

    failures: int
    exposure_s: float  # observed; of nodes their seconds added up
    mean_s: float | None
    low_s: float | None
    high_s: float | None


def mtbf(failures: int, exposure_s: float) -> Mtbf:
    """The exact interval (Garwood, Biometrika 28, 1936; there with chi-square quantiles), two-sided 95 %.

    `failures` within `exposure_s` seconds, of which the end does not depend on failures.
    """
    if exposure_s <= 0:
        return Mtbf(failures, 0.0, None, None, None)
    if not failures:
        return Mtbf(0, exposure_s, None, exposure_s / -math.log(1 - LEVEL), None)
    tail = (1 - LEVEL) / 2
    most, least = _mean_where(failures, tail), _mean_where(failures - 1, 1 - tail)
    return Mtbf(failures, exposure_s, exposure_s / failures, exposure_s / most, exposure_s / least)


def _mean_where(n: int, probability: float) -> float:
    """The mean of a Poisson variable that is at most `n` with this probability; by bisection."""
    low, high = 0.0, n + 10 * math.sqrt(n + 1) + 20
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _at_most(n, middle) > probability else (low, middle)
    return middle


def _at_most(n: int, mean: float) -> float:
    """P(X <= n) of a Poisson variable."""
    log_mean = math.log(mean) if mean else -math.inf
    return math.fsum(
        math.exp(k * log_mean - mean - math.lgamma(k + 1)) if k else math.exp(-mean) for k in range(n + 1)
    )
