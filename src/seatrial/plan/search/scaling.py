"""Scaling of a layout from a few nodes to many: tensor and pipeline sizes are constant, data parallel grows.

Weak: every replica keeps its microbatches, so the global batch grows with the GPUs. Strong: the global batch is constant,
so every replica has fewer. In both, efficiency is tokens/s/GPU over that of the first point; in strong scaling that is the
speedup over the ideal one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seatrial.job.job import Job
from seatrial.job.numbers import divisors
from seatrial.plan.cost.accumulate import adapted
from seatrial.plan.cost.calibration import Calibration
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.predict import Prediction, capacity, predict
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.cost.step import SLOWER_BY_DOUBLING
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import Found, search

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, Mode] = ("weak", "strong")

# Communication counts as significant once its share of the step has grown by this much since the first point.
SHOWS = 0.05


@dataclass(frozen=True)
class Point:
    """The layout at one size. If it is impossible or unknown, `why_not` says why and the figures are None.

    A layout that does not fit has a recipe, a prediction (with its memory) and a `why_not`, but no figures.
    """

    nodes: int
    gpus: int
    recipe: Recipe | None
    prediction: Prediction | None
    why_not: str | None
    global_batch: int | None  # sequences
    tokens_per_s: float | None  # of all GPUs
    efficiency: float | None  # tokens/s/GPU over the first point's
    doubling: float | None  # over that of the point of half the size
    speedup: float | None  # tokens/s over the first point's
    exposed: float | None  # share of the step that is exposed communication
    costs: str | None  # the part that grew most since the first point, as text


@dataclass(frozen=True)
class Scaling:
    """The points by size, none dropped."""

    mode: Mode
    points: tuple[Point, ...]
    grows: str  # which dimension of the layout grows, as text
    assumes: tuple[str, ...]
    best: bool = False  # the best layout at each size instead of the same one

    @property
    def name(self) -> str:
        """The name: weak scaling, strong scaling or best layouts."""
        return "best layouts" if self.best else f"{self.mode} scaling"

    @property
    def known(self) -> tuple[Point, ...]:
        """The points that have figures."""
        return tuple(p for p in self.points if p.efficiency is not None)

    @property
    def shows_at(self) -> Point | None:
        """The first point whose share of exposed communication exceeds the first point's by more than `SHOWS`."""
        known = self.known
        return next((p for p in known[1:] if _of(p.exposed) - _of(known[0].exposed) > SHOWS), None)

    @property
    def worst(self) -> Point | None:
        """The point that loses most efficiency over half its size; None without two such sizes."""
        return min(
            (p for p in self.known if p.doubling is not None), key=lambda p: _of(p.doubling), default=None
        )

    @property
    def unknown(self) -> str:
        """Why there are not two sizes to compare; empty if there are."""
        if len(self.known) > 1:
            return ""
        entries = [f"{p.gpus:,} GPUs: {p.why_not}" for p in self.points if p.why_not is not None]
        return entries[0] if entries else "only one size was asked for"


def scaling(
    job: Job,
    recipe: Recipe,
    cluster: Cluster,
    *,
    mode: Mode,
    nodes: Sequence[int],
    calibration: Calibration | None = None,
    stack: str | Stack = "seatrial",
) -> Scaling:
    """Predict `recipe` at each number of `nodes`; the number of nodes of `cluster` itself does not matter.

    ValueError for a number of nodes below 1.
    """
    points: list[Point] = []
    for at in _sizes(cluster, nodes):
        wanted, why_not = resized(recipe, at.gpus, mode=mode)
        if wanted is not None:
            wanted = adapted(job, wanted, capacity(at), stack)
        if wanted is not None and (refused := refusal(job, at, wanted)) is not None:
            why_not = refused.message
        found = None
        if wanted is not None and why_not is None and at.several_domains and cluster.network is None:
            why_not = "the network between the nodes is unknown"
        if wanted is not None and why_not is None:
            try:
                found = predict(job.architecture, wanted, at, stack=stack, calibration=calibration)
            except UnknownSpeedError as error:
                why_not = str(error)
            if found is not None and not found.fits:
                need, have = found.memory.reserved / 2**30, capacity(at) / 2**30
                why_not = f"does not fit: {need:.0f} GiB a GPU of {have:.0f}"
        points.append(_point(at, wanted, found, why_not, points))
    return Scaling(mode, tuple(points), _grows(recipe, mode), _assumes(cluster, mode))


def best_scaling(
    job: Job,
    cluster: Cluster,
    *,
    nodes: Sequence[int],
    known: Mapping[int, Found] | None = None,
    calibration: Calibration | None = None,
    stack: str | Stack = "seatrial",
) -> Scaling:
    """The best layout at each number of `nodes`, with the job's global batch.

    `known`: earlier results by number of nodes. Others are searched, which takes seconds for large ones.
    ValueError for a number of nodes below 1.
    """
    points: list[Point] = []
    for at in _sizes(cluster, nodes):
        found, why_not = (known or {}).get(at.nodes), None
        if at.several_domains and cluster.network is None:
            found, why_not = None, "the network between the nodes is unknown"
        elif found is None:
            try:
                found = search(job, at, calibration=calibration, own=False, stack=stack)
            except UnknownSpeedError as error:
                why_not = str(error)
        best = found.choices[0] if found is not None and found.choices else None
        if found is not None and best is None:
            why_not = "no layout is legal"
            if found.tried:
                need, have = found.least_bytes / 2**30, capacity(at) / 2**30
                why_not = f"no layout fits: the smallest needs {need:.0f} GiB a GPU of {have:.0f}"
        recipe = None if best is None else best.recipe
        points.append(_point(at, recipe, None if best is None else best.prediction, why_not, points))
    grows = "the best layout at each size, with the same global batch"
    return Scaling("strong", tuple(points), grows, _assumes(cluster, "strong"), best=True)


def _sizes(cluster: Cluster, nodes: Sequence[int]) -> list[Cluster]:
    if any(n < 1 for n in nodes):
        raise ValueError(f"no cluster of {min(nodes)} nodes")
    return [replace(cluster, nodes=n) for n in sorted(set(nodes))]


def resized(recipe: Recipe, gpus: int, *, mode: Mode) -> tuple[Recipe | None, str | None]:
    """`recipe` with data parallel resized to fill `gpus`, or why that is impossible.

    As in the trainer without `shard`, the shard group spans all of data parallel. A recipe with replicas keeps its shard
    group and changes their number; if that does not divide, it uses the largest smaller shard group that does.
    """
    layout = recipe.layout
    each = layout.tensor * layout.pipeline * recipe.context
    if gpus % each:
        size = f"{_model_parallel(recipe)} = {each}"
        if gpus < each:
            return None, f"a replica needs {size} GPUs, only {gpus} available"
        return None, f"{gpus} GPUs are not a multiple of {size}"
    data = gpus // each
    shard = data
    if layout.replicate > 1:
        shard = max(divisors(data, most=layout.shard))
    batch = recipe.global_batch
    if mode == "weak":
        if batch % layout.data_parallel:
            return (
                None,
                f"global batch {batch} is not divisible by the data-parallel size {layout.data_parallel}",
            )
        batch = batch // layout.data_parallel * data
    layout = replace(layout, shard=shard, replicate=data // shard)
    return replace(recipe, layout=layout, global_batch=batch), None


def exposed(prediction: Prediction) -> float:
    """Share of exposed communication in the step: tensor, context, pipeline and data parallel."""
    p = prediction.parts
    return (p.tensor + p.context + p.pipeline + p.data) / p.total


def _point(
    at: Cluster, recipe: Recipe | None, found: Prediction | None, why_not: str | None, before: Sequence[Point]
) -> Point:
    batch = None if recipe is None else recipe.global_batch
    if recipe is None or found is None or why_not is not None:
        return Point(at.nodes, at.gpus, recipe, found, why_not, batch, None, None, None, None, None, None)
    known = [p for p in before if p.tokens_per_s is not None]
    each = found.tokens_per_s_per_gpu
    first = known[0] if known else None
    half = next((p for p in known if 2 * p.gpus == at.gpus), None)
    start = each if first is None else _of(first.tokens_per_s) / first.gpus
    return Point(
        nodes=at.nodes,
        gpus=at.gpus,
        recipe=recipe,
        prediction=found,
        why_not=None,
        global_batch=batch,
        tokens_per_s=each * at.gpus,
        efficiency=each / start,
        doubling=None if half is None else each * half.gpus / _of(half.tokens_per_s),
        speedup=1.0 if first is None else each * at.gpus / _of(first.tokens_per_s),
        exposed=exposed(found),
        costs=None if first is None or first.prediction is None else _costs(first.prediction, found),
    )


def _costs(first: Prediction, now: Prediction) -> str | None:
    """The part whose share of the step grew most since the first point; None if none grew by 0.5 percentage points."""
    grown = [
        (b.share - a.share, b.name)
        for a, b in zip(first.waterfall[1:], now.waterfall[1:], strict=True)
        if b.share - a.share >= 0.005
    ]
    if not grown:
        return None
    by, name = max(grown)
    return f"{name} (+{by * 100:.0f} % of the step)"


def _grows(recipe: Recipe, mode: Mode) -> str:
    batch = "the global batch with them" if mode == "weak" else "the global batch stays the same"
    stays = f"{_model_parallel(recipe)} stays"
    if recipe.layout.replicate > 1:
        return f"{stays}; replicas of a shard group of {recipe.layout.shard} are added, {batch}"
    return f"{stays}; the shard group spans all of data parallel, {batch}"


def _model_parallel(recipe: Recipe) -> str:
    sizes = (("TP", recipe.layout.tensor), ("CP", recipe.context), ("PP", recipe.layout.pipeline))
    return " x ".join(f"{name}{n}" for name, n in sizes if n > 1 or name == "TP")


def _assumes(cluster: Cluster, mode: Mode) -> tuple[str, ...]:
    entries: tuple[str, ...] = ()
    if cluster.network is not None:
        entries += (
            f"every node has its full rate at every size, without other traffic: {cluster.network.name}",
        )
    entries += (f"stragglers cost {SLOWER_BY_DOUBLING:.1%} with every doubling, not more",)
    if mode == "weak":
        entries += ("a larger global batch may need another learning rate: tokens/s is not convergence",)
    return entries


def _of(value: float | None) -> float:
    assert value is not None
    return value
