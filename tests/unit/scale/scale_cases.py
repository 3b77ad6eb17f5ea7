"""The job that the tests of `scale` measure, and runs of it as they are recorded."""

from __future__ import annotations

from functools import partial

from presets import preset_job
from seatrial.scale.statistics import Estimate, estimate
from seatrial.scale.trial import Figures, Trial

STORE = "/nowhere/store"


job = partial(preset_job, "first-voyage")  # 2 nodes of 4 ranks


def trial(
    nodes: int,
    tokens_per_s: float = 1000.0,
    *,
    seconds: float = 36.0,
    problem: str = "",
    mfu: float | None = None,
) -> Trial:
    figures = Figures(5, 25, 0.5, tokens_per_s, mfu, [5.0, 4.5, 4.25, 4.125])
    return Trial(nodes, nodes, 1.0, seconds, f"{nodes}-nodes-1", problem, None if problem else figures)


def speed(mean: float, relative: float = 0.01) -> Estimate:
    """An estimate of four values around `mean` with this relative standard deviation."""
    return estimate([mean * (1 + relative * z) for z in (-1.1619, -0.3873, 0.3873, 1.1619)])
