"""Formulas beside the simulation of ETTR: intervals, two expectations, how many spares, confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from seatrial.plan.ettr import Case
from seatrial.record.interval import young


def daly(save_s: float, mttf_s: float) -> float:
    """Daly's first-order interval sqrt(2 w M) - w, in seconds (J. T. Daly, FGCS 22(3), 2006)."""
    return young(save_s, mttf_s) - save_s


def _waits(case: Case) -> list[float]:
    """Mean wait of each branch for a node, were there never a spare: the shorter of repair and replacement."""
    swap = case.repair_s * -math.expm1(-case.replacement_s / case.repair_s) if case.repair_s else 0.0
    by_remedy = {"process": 0.0, "reset": min(case.reset_s, case.replacement_s), "node": swap}
    return [by_remedy[b.remedy] for b in case.branches]


def _shrunk(case: Case, wait: float) -> float:
    """Seconds that a run which shrinks loses while a node is away: one replica's speed, and both restarts' extra."""
    return wait * case.replica_nodes / case.nodes + case.shrink_extra_s + case.grow_s


def first_order(case: Case) -> float:
    """E[ETTR] about (1 - N r (R + tau/2)) / (1 + w/tau) (after Kokolis et al., arXiv:2410.21680), with this case's terms.

    R is the mean over branches, with the wait for a node where there are no spares; tau is the interval of the tier
    that is resumed from, and its lag is lost on top. Snapshots divide by 1 + their overhead. Neither failures during
    recovery nor a pool that runs dry are in it. May fall below 0, where it means nothing.
    """
    lost = (case.memory_interval_s or case.disk_interval_s) / 2
    lost += case.memory_lag_s if case.memory_interval_s else case.disk_lag_s
    for branch, wait in zip(case.branches, _waits(case), strict=True):
        lost += branch.share * branch.down_s
        if not case.spares and branch.remedy != "process":
            lost += branch.share * (_shrunk(case, wait) if case.shrink else wait)
    costs = (1 + case.memory_overhead) * (1 + case.disk_stall_s / case.disk_interval_s)
    return (1 - lost / case.mttf_s) / costs


def renewal(case: Case) -> float:
    """E[ETTR] of the renewal process, failures during recovery included; exact for one tier and enough spares.

    A life between two recoveries is exponential with mean M. It banks a whole interval of work for each S seconds
    (interval, overhead and stalls) that it lasts beyond the lag L: exp(-L/M) / (exp(S/M) - 1) of them on average. A recovery is
    repeated until no failure strikes within it: with p = E[exp(-R/M)], M / p passes from life to life.
    (Daly's complete model, FGCS 22(3), 2006, is the case L = 0 and a single R.) Two approximations: beside a memory
    tier the stalls of disk saves are spread evenly, and a wait for a node counts as part of R.
    """
    interval = case.memory_interval_s or case.disk_interval_s
    lag = case.memory_lag_s if case.memory_interval_s else case.disk_lag_s
    wall = interval * (1 + case.memory_overhead) * (1 + case.disk_stall_s / case.disk_interval_s)
    if math.isinf(case.mttf_s):
        return interval / wall
    rate, survive, away = 1 / case.mttf_s, 0.0, 0.0
    for branch, wait in zip(case.branches, _waits(case), strict=True):
        short = not case.spares and branch.remedy != "process"
        down = branch.down_s + (wait if short and not case.shrink else 0.0)
        survive += branch.share * math.exp(-rate * down)
        if short and case.shrink:
            away += rate * branch.share * _shrunk(case, wait)
    return interval * rate * survive * math.exp(-rate * lag) / math.expm1(rate * wall) * (1 - away)


def spares_for(mean_away: float, quantile: float = 0.99) -> int:
    """The fewest spares that cover the nodes away for repair with this probability.

    Nodes away at once are Poisson with mean N r x (mean time away), whatever the repair time's distribution (M/G/infinity).
    """
    term = total = math.exp(-mean_away)
    spares = 0
    while total < quantile:
        spares += 1
        term *= mean_away / spares
        total += term
    return spares


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); nan of a single value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, math.nan
    # Abramowitz and Stegun 26.7.5: t from the normal quantile z; within 0.5 % from five values on.
    z, v = 1.959964, n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return mean, t * statistics.stdev(values) / math.sqrt(n)
