"""Joint fit of the factors of `plan/cost/calibration.py` to measured steps.

Minimises the sum of |log(predicted / measured)|^1.2, so that outliers have little weight and two rows still have a unique
minimum. Rows of one model are correlated, so each is weighted by 1 / sqrt(number of its rows). Every effect is shrunk towards 0 by a prior
of standard deviation `PRIOR`, so that few rows change little, and effects common to all stacks of a chip are separated from a stack's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plan_rows import Row
from seatrial.plan.cost.calibration import (
    ARCHITECTURES,
    CELLS,
    FAMILIES,
    UNIT_FACTORS,
    Calibration,
    Entry,
    Factors,
    Pace,
)
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import step_parts

# Standard deviations of the effects' logarithms, by the beginning of their names: assumptions. Nothing is known of the typical pace.
PRIOR = {
    "typical": 10.0,
    "family": FAMILIES,
    "architecture": ARCHITECTURES,
    "power": 0.5,
    "cell": CELLS,
    "fp8": 0.2,
    "operators of": 0.2,
    "operators": 0.3,
    "attention": 0.15,
    "source": 0.05,
}
LEFT = 0.05  # of what is left of log(measured / predicted)
POWER, ROUNDS, NEAR, STEP = 1.2, 20, 0.01, 0.05


@dataclass(frozen=True)
class Line:
    """log(predicted / measured) of one row, linearised in the logarithms of (pace, operators, attention), 0 at `at`."""

    at: tuple[float, float, float]
    slope: tuple[float, float, float]


def seconds(row: Row, pace: float, factors: Factors = UNIT_FACTORS) -> float:
    return step_parts(
        row.model, row.recipe, Fabric.of(row.cluster, row.recipe), stacks()[row.stack], pace, factors
    ).total


def predicted(row: Row, pace: Pace) -> float:
    """Seconds of a step."""
    return seconds(row, pace.value, pace.factors)


def own_pace(row: Row) -> float | None:
    """The pace that predicts this row exactly; None if even infinitely fast kernels are too slow."""
    assert row.step_s is not None
    low, high = 0.05, 20.0
    if seconds(row, low) >= row.step_s:
        return None
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seconds(row, middle) > row.step_s else (middle, high)
    return math.sqrt(low * high)


def line(row: Row) -> Line | None:
    """Linearisation around the row's own pace; None if it has none."""
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
    """Calibration fitted to these rows, with the families of `like`."""
    found = [(row, at) for i, row in rows if (at := lines[i]) is not None]
    if not found:
        return replace(like, entries=())
    effects = _fit(found, like)

    def factor(name: str) -> float:
        return round(math.exp(effects.get(name, 0.0)), 3)

    def all_of(kind: str) -> dict[str, float]:
        return {n.removeprefix(kind): factor(n) for n in sorted(effects) if n.startswith(kind)}

    known = replace(
        like,
        entries=(),
        families=all_of("family "),
        operators_of=all_of("operators of "),
        operators=factor("operators"),
        architectures=all_of("architecture "),
        typical=factor("typical"),
        attention=factor("attention"),
        power=round(effects.get("power", 0.0), 3),
        fp8=factor("fp8"),
    )
    cells: dict[tuple[str, str], list[Row]] = {}
    for row, _ in found:
        cells.setdefault((row.stack, row.gpu), []).append(row)
    entries = []
    for (stack, gpu), those in cells.items():
        sources = sorted({row.source for row in those})
        chip, family = those[0].cluster.gpu, like.family.get(stack, "")
        pace = (
            known.typical * known.families[family] * known.gpu_factor(chip) * factor(f"cell {stack} on {gpu}")
        )
        entries.append(
            Entry(stack, gpu, round(pace, 3), len(those), "; ".join(sources), chip.architecture, len(sources))
        )
    return replace(known, entries=tuple(entries))


def _effects(row: Row, like: Calibration) -> tuple[dict[str, float], ...]:
    """Effects on the logarithms of (pace, operators, attention), by name, with their counts."""
    gpu, family = row.cluster.gpu, like.family.get(row.stack, "")
    pace = {
        "typical": 1.0,
        f"family {family}": 1.0,
        f"architecture {gpu.architecture}": 1.0,
        "power": math.log(replace(like, architectures={}, power=1.0).gpu_factor(gpu)),
        f"cell {row.stack} on {row.gpu}": 1.0,
        "fp8": float(row.recipe.precision == "fp8"),
    }
    return pace, {"operators": 1.0, f"operators of {family}": 1.0}, {"attention": 1.0}


def _fit(found: list[tuple[Row, Line]], like: Calibration) -> dict[str, float]:
    """All effects, by iteratively reweighted least squares. Effects of sources are fitted and dropped: a new source has none."""
    names: dict[str, int] = {}
    entries: list[tuple[int, int, float]] = []
    for i, (row, at) in enumerate(found):
        kinds = zip(_effects(row, like), at.slope, strict=True)
        terms = [(n, v * slope) for effects, slope in kinds for n, v in effects.items()]
        for name, value in (*terms, (f"source {row.source}", 1.0)):
            entries.append((i, names.setdefault(name, len(names)), value))
    slopes = np.zeros((len(found), len(names)))
    for i, j, value in entries:
        slopes[i, j] += value
    zeros = np.array([float(np.dot(x.slope, x.at)) for _, x in found])
    same = Counter((row.stack, row.gpu, row.name) for row, _ in found)
    counts = np.array([same[row.stack, row.gpu, row.name] ** -0.5 for row, _ in found])
    prior = np.diag([next(sd for kind, sd in PRIOR.items() if n.startswith(kind)) ** -2 for n in names])
    weights, theta = counts / LEFT**2, np.zeros(len(names))
    for _ in range(ROUNDS):
        theta = np.linalg.solve((slopes.T * weights) @ slopes + prior, (slopes.T * weights) @ zeros)
        off = np.maximum(np.abs(slopes @ theta - zeros), NEAR)
        weights = counts * off ** (POWER - 2) / LEFT**POWER
    return {name: float(theta[j]) for name, j in names.items()}
