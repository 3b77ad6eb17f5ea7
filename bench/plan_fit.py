"""Calibration from measured steps: for each stack and GPU the three numbers of `plan/cost/calibration.py` that its rows give.

The sum of |log(predicted / measured)| to the power of 1.2 is made smallest: single odd rows count little, and two rows still have a
middle. A model's rows say partly the same: each counts by one over the root of their number. `operators` and `attention` are drawn towards 1, as if measured before with the
deviations of `PRIOR`: stacks differ by so much in what they fuse, and few rows do not tell kinds of kernels apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plan_rows import Row
from seatrial.plan.cost.calibration import EVEN, Calibration, Entry, Factors, Pace, Z
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import step_parts

# A spread from few rows says little: it is drawn towards what stacks usually have, as if four more rows had that.
USUAL, WORTH = 0.08, 4
# Standard deviations of log(operators) and log(attention), and of what is left of log(measured / predicted).
PRIOR, LEFT = (0.3, 0.15), 0.05
POWER, ROUNDS, NEAR, STEP = 1.2, 60, 0.01, 0.05


@dataclass(frozen=True)
class Line:
    """log(predicted / measured) of one row, a straight line in the logarithms of (pace, operators, attention), 0 at `at`."""

    at: tuple[float, float, float]
    slope: tuple[float, float, float]


def seconds(row: Row, pace: float, factors: Factors = EVEN) -> float:
    return step_parts(
        row.model, row.recipe, Fabric.of(row.cluster, row.recipe), stacks()[row.stack], pace, factors
    ).total


def predicted(row: Row, pace: Pace) -> float:
    """Seconds of a step."""
    return seconds(row, pace.value, pace.factors)


def own_pace(row: Row) -> float | None:
    """The pace that would have predicted this row exactly; None where even infinitely fast kernels are too slow."""
    assert row.step_s is not None
    low, high = 0.05, 20.0
    if seconds(row, low) >= row.step_s:
        return None
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seconds(row, middle) > row.step_s else (middle, high)
    return math.sqrt(low * high)


def line(row: Row) -> Line | None:
    """Around the row's own pace; None where it has none."""
    pace = own_pace(row)
    if pace is None:
        return None

    def log_seconds(at: Sequence[float]) -> float:
        return math.log(seconds(row, math.exp(at[0]), Factors(math.exp(at[1]), math.exp(at[2]))))

    at = (math.log(pace), 0.0, 0.0)
    slope = []
    for k in range(3):
        high, low = ([a + sign * STEP * (i == k) for i, a in enumerate(at)] for sign in (1, -1))
        slope.append((log_seconds(high) - log_seconds(low)) / (2 * STEP))
    return Line(at, (slope[0], slope[1], slope[2]))


Lines = dict[int, Line | None]


def calibrate(rows: Iterable[tuple[int, Row]], lines: Lines, like: Calibration) -> Calibration:
    """`like` with what these rows give in place of its entries."""
    groups: dict[tuple[str, str], list[tuple[Row, Line]]] = {}
    for i, row in rows:
        found = lines[i]
        if found is not None:
            groups.setdefault((row.stack, row.gpu), []).append((row, found))
    return replace(like, entries=tuple(_entry(stack, gpu, found) for (stack, gpu), found in groups.items()))


def _entry(stack: str, gpu: str, found: list[tuple[Row, Line]]) -> Entry:
    pace, operators, attention = (round(math.exp(x), 3) for x in _fit(found))
    misses = sorted(
        abs(math.log(seconds(row, pace, Factors(operators, attention)) / row.step_s))
        for row, _ in found
        if row.step_s
    )
    seen, n = misses[min(len(misses) - 1, int(0.85 * len(misses)))] / Z, len(misses)
    spread = math.sqrt((n * seen**2 + WORTH * USUAL**2) / (n + WORTH))
    sources = "; ".join(sorted({row.source for row, _ in found}))
    return Entry(stack, gpu, pace, round(spread, 3), n, sources, operators, attention)


def _fit(found: list[tuple[Row, Line]]) -> list[float]:
    """Logarithms of (pace, operators, attention), by weighing squares anew in each round."""
    slopes = np.array([x.slope for _, x in found])
    zeros = np.array([float(np.dot(x.slope, x.at)) for _, x in found])
    same = Counter(row.name for row, _ in found)
    counts = np.array([same[row.name] ** -0.5 for row, _ in found])
    prior = np.diag([0.0, *(sd**-2 for sd in PRIOR)])
    theta = np.zeros(3)
    theta[0] = float(np.median([x.at[0] for _, x in found]))
    for _ in range(ROUNDS):
        off = np.maximum(np.abs(slopes @ theta - zeros), NEAR)
        weights = counts * off ** (POWER - 2) / LEFT**POWER
        theta = np.linalg.solve((slopes.T * weights) @ slopes + prior, (slopes.T * weights) @ zeros)
    return [float(x) for x in theta]
