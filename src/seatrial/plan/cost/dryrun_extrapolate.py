"""Exact extrapolation from traces of few layers and microbatches to a whole step.

Layers of a stage are equal, and so are the microbatches of a schedule in steady state. So every count of a step
is a + b q + c M + d q M, with q layers a stage and M microbatches: four traces determine it, in integers. Peak memory is
not a count: with more layers it may be elsewhere. But the peak of each section of the step (for example the backward pass
of the last layer of the second microbatch up to its third GEMM) has this form too, so each is extrapolated separately,
and the highest is the step's peak. Sections in the middle of a step, which a smaller trace lacks, are no higher than those
at one of their ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.job.layout import Layout
from seatrial.job.schedules import schedule_named

# Layers with names of their own at either end of a stage in the smaller trace, at least (see train.dryrun.timeline.position).
_EDGE = 2


@dataclass(frozen=True)
class Axis:
    """One of the two sizes: its target value, and the one or two values that are traced."""

    wanted: int
    traced: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing is extrapolated."""
        return len(self.traced) == 1

    @property
    def steps(self) -> int:
        """(target - first traced value) / (second - first)."""
        if self.exact:
            return 0
        first, second = self.traced
        steps, rest = divmod(self.wanted - first, second - first)
        assert rest == 0, f"{self} is between two schedules"
        return steps


@dataclass(frozen=True)
class Grid:
    """The sizes at which a rank is traced."""

    layers: Axis  # of the whole model
    microbatches: Axis
    edges: tuple[int, int]  # microbatches at the beginning and at the end that have labels of their own

    @property
    def points(self) -> list[tuple[int, int]]:
        """(layers, microbatches) of each trace, in the order that `extrapolate` expects."""
        return [(layers, m) for layers in self.layers.traced for m in self.microbatches.traced]

    @property
    def exact(self) -> bool:
        return self.layers.exact and self.microbatches.exact


def grid(
    layout: Layout, layers: int, microbatches: int, period: int = 1, *, dense: int = 0, whole: bool = False
) -> Grid:
    """The sizes to trace for a model with `layers`; `whole`: its full sizes, without extrapolation.

    The remainder of layers over stages is kept, so that the same stages are the larger ones (`Layout.stage_layers`). If
    only every `period`-th layer of a stage is recomputed, so is the remainder of a stage's layers over `period`. The first
    `dense` layers are others than the rest: all traces have them.
    """
    each, spare = divmod(layers, layout.stages)
    sizes: tuple[int, ...] = (layers,)
    least = dense + 2 * max(_EDGE, period)
    least += (each - least) % period
    if not whole and each > least + period:
        sizes = tuple(n * layout.stages + spare for n in (least, least + period))
    counts: tuple[int, ...] = (microbatches,)
    edges = _edges(layout)
    step = layout.pipeline if schedule_named(layout.schedule).several_stages else 1
    if not whole and microbatches > sum(edges) + step:
        counts = (sum(edges), sum(edges) + step)
    return Grid(Axis(layers, sizes), Axis(microbatches, counts), edges)


def _edges(layout: Layout) -> tuple[int, int]:
    """How many microbatches the pipeline's warm-up affects at the beginning, and its cool-down at the end.

    In 1F1B a rank has at most P microbatches in flight. With several stages a rank, its first one has up to 2 P in flight
    before the first backward pass (arXiv:2104.04473, section 2.2).
    """
    p = layout.pipeline
    if p > 1 and schedule_named(layout.schedule).several_stages:
        return 2 * p, 2 * p
    return p + 1, p


Values = Mapping[Any, int]


def extrapolate(at: Grid, traces: Sequence[Values]) -> dict[Any, int]:
    """The values at the target size, from the traces at `at.points`. A key that a trace lacks is 0 there."""
    keys = set().union(*traces)
    x, y = at.layers.steps, at.microbatches.steps
    n = len(at.microbatches.traced)
    out = {}
    for key in keys:
        values = [t.get(key, 0) for t in traces]
        # First along microbatches, at each number of layers; then along layers.
        rows = [
            row[0] + (row[-1] - row[0]) * y for row in (values[i : i + n] for i in range(0, len(values), n))
        ]
        out[key] = rows[0] + (rows[-1] - rows[0]) * x
    return out


def extrapolate_peak(
    at: Grid, traces: Sequence[Mapping[str, Mapping[str, int]]]
) -> tuple[str, dict[str, int]]:
    """(label, bytes by kind) of the peak at the target size. `traces`: label -> kind -> bytes."""
    labels = set(traces[0]).intersection(*traces[1:])
    heights = {label: extrapolate(at, [t[label] for t in traces]) for label in labels}
    best = max(sorted(heights), key=lambda label: sum(heights[label].values()))
    return best, {kind: n for kind, n in sorted(heights[best].items()) if n}
