"""What would change a prediction, what would change the choice, and whether a wish is within reach: each by predicting it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.plan.calibration import Calibration
from seatrial.plan.cluster import Cluster
from seatrial.plan.collectives import UnknownNetworkError
from seatrial.plan.kernels import UnknownSpeedError
from seatrial.plan.legal import refusal
from seatrial.plan.model import Model
from seatrial.plan.overlap import able
from seatrial.plan.predict import Prediction, Share, predict, stack_for
from seatrial.plan.recipe import Recipe
from seatrial.plan.search import MICROBATCHES, STAGES_PER_RANK, Found
from seatrial.plan.stacks import Stack, stacks

# The same configuration differs by as much from release to release (plan/calibration.py): closer layouts cannot be told apart.
ALIKE = 0.04
# Less than this is not worth a line.
_WORTH = 0.01
# The stack that stands for what other software does: it hides the most communication of those with published results on many GPUs.
OTHER = "nemo"
FURTHEST = 64.0  # a turn is looked for within this factor of what there is

Reached = Literal["yes", "inside", "no"]
"""A wish is met by the prediction itself; only within its interval; not even there."""


@dataclass(frozen=True)
class Wanted:
    """A wish: tokens/s of one GPU, or a share of the peak (MFU)."""

    value: float
    of: Literal["tokens/s/GPU", "MFU"]

    def by(self, p: Prediction) -> Reached:
        """Whether a prediction has it. MFU of an unknown peak is no."""
        here = p.tokens_per_s_per_gpu if self.of == "tokens/s/GPU" else (p.mfu or 0.0)
        if here >= self.value:
            return "yes"
        return "inside" if here * p.step_s / p.low_s >= self.value else "no"


@dataclass(frozen=True)
class Way:
    """One change, and what it is predicted to bring. `built`: whether this trainer can do it today."""

    what: str
    recipe: Recipe
    prediction: Prediction
    gain: float  # of the speed, over the job's own layout
    built: bool = True


@dataclass(frozen=True)
class Turn:
    """From which value of one thing another layout would be the best, of those that were listed."""

    what: str
    unit: str
    now: float
    at: float | None  # None: none does, within a factor of FURTHEST
    becomes: Recipe | None


@dataclass(frozen=True)
class Advice:
    """Ways from the one that gains most; turns of the choice."""

    ways: tuple[Way, ...]
    turns: tuple[Turn, ...]
    alike: tuple[Recipe, ...]  # that cannot be told from the best


@dataclass(frozen=True)
class Target:
    """A wish, and the first way that would meet it: by its prediction, or within its interval."""

    wanted: Wanted
    own: Reached
    inside: Way | None
    met: Way | None


@dataclass(frozen=True)
class _Asker:
    job: Job
    model: Model
    cluster: Cluster
    stack: str | Stack
    calibration: Calibration | None

    def ask(
        self, recipe: Recipe, *, cluster: Cluster | None = None, stack: Stack | None = None
    ) -> Prediction | None:
        """None where the rules refuse it, or it does not fit, or a speed is not known."""
        at = cluster or self.cluster
        if allowed(self.job, at, recipe) is not None:
            return None
        try:
            found = predict(self.model, recipe, at, stack=stack or self.stack, calibration=self.calibration)
        except (UnknownNetworkError, UnknownSpeedError):
            return None
        return found if found.fits else None


def advice(
    job: Job,
    model: Model,
    own: Recipe,
    cluster: Cluster,
    found: Found | None,
    stack: str | Stack = "seatrial",
    calibration: Calibration | None = None,
) -> Advice:
    """About `own`, and about the best of `found`."""
    asker = _Asker(job, model, cluster, stack, calibration)
    base = predict(model, own, cluster, stack=stack, calibration=calibration)
    ways = _ways(asker, own, base, found)
    listed = found.choices if found is not None else ()
    alike: tuple[Recipe, ...] = ()
    if listed:
        best = listed[0].prediction.step_s
        alike = tuple(c.recipe for c in listed[1:] if c.prediction.step_s <= best * (1 + ALIKE))
    return Advice(tuple(ways), tuple(_turns(asker, [c.recipe for c in listed])), alike)


def targets(
    job: Job,
    model: Model,
    own: Recipe,
    cluster: Cluster,
    found: Found | None,
    wishes: Sequence[Wanted],
    stack: str | Stack = "seatrial",
    calibration: Calibration | None = None,
) -> tuple[Target, ...]:
    """Each wish against the job's own layout, and the smallest changes that would meet it, built ones first."""
    if not wishes:
        return ()
    base = predict(model, own, cluster, stack=stack, calibration=calibration)
    ways = _ways(_Asker(job, model, cluster, stack, calibration), own, base, found)
    ways.sort(key=lambda w: (not w.built, w.gain))
    return tuple(
        Target(
            wish,
            wish.by(base),
            next((w for w in ways if wish.by(w.prediction) == "inside"), None),
            next((w for w in ways if wish.by(w.prediction) == "yes"), None),
        )
        for wish in wishes
    )


def allowed(job: Job, cluster: Cluster, recipe: Recipe) -> str | None:
    """Why our trainer refuses a recipe of this job; None if it does not."""
    r = recipe
    found = refusal(
        job,
        cluster,
        layout_of(r),
        microbatch=r.microbatch,
        reshard=r.reshard,
        async_tensor=r.async_tensor,
    )
    if found is None and recipe.compiled and recipe.schedule == "zero-bubble" and recipe.pipeline > 1:
        return "zero-bubble with compile = true gives wrong gradients"
    return None if found is None else found.message


def excess(p: Prediction, best: Prediction) -> Share | None:
    """The part of a step that costs most more than in the best layout, with the seconds of it; None where none does."""
    parts = [
        Share(a.name, (a.seconds - b.seconds) / p.step_s, a.seconds - b.seconds)
        for a, b in zip(p.waterfall[1:], best.waterfall[1:], strict=True)
    ]
    worst = max(parts, key=lambda s: s.seconds)
    return worst if worst.seconds > 0 else None


def layout_of(recipe: Recipe) -> Layout:
    r = recipe
    return Layout(r.pipeline, r.replicate, r.shard, r.tensor, r.stages_per_rank, r.schedule)


def _ways(asker: _Asker, own: Recipe, base: Prediction, found: Found | None) -> list[Way]:
    ways: list[Way] = []

    def add(what: str, recipe: Recipe, p: Prediction | None, *, built: bool = True) -> None:
        if p is None:
            return
        gain = base.step_s / p.step_s - 1
        if base.fits and gain < _WORTH:
            return
        ways.append(Way(what, recipe, p, gain, built))

    for kind in _settings(own, stack_for(own, asker.stack)):
        tried = [(what, r, p) for what, r in kind if (p := asker.ask(r)) is not None]
        if tried:
            add(*min(tried, key=lambda t: t[2].step_s))
    mine = None
    if found is not None and found.choices:
        best = found.choices[0]
        mine = next((c for c in found.choices if _pair(c.recipe) == _pair(own)), None)
        if mine is not None and mine is not best and mine.recipe != own:
            add("the best with its tensor and pipeline sizes", mine.recipe, mine.prediction)
        if best.recipe != own:
            add("the best layout", best.recipe, best.prediction)
    other, plain = stacks()[OTHER], replace(own, async_tensor=False)
    if stack_for(own, asker.stack).name != OTHER and (tuned := _tuned(asker, plain, other)) is not None:
        changed = "" if tuned[0] == plain else f", {difference(plain, tuned[0])}"
        add(f"{OTHER} in place of this trainer{changed}", *tuned, built=False)
    network = asker.cluster.network
    if network is not None and asker.cluster.nodes > 1:
        twice = replace(asker.cluster, network=replace(network, gbps_per_nic=2 * network.gbps_per_nic))
        add("a network twice as fast", own, asker.ask(own, cluster=twice), built=False)
    # Two names of one thing: the first, which is the smaller change, stays.
    seen = {(w.recipe, w.prediction.step_s): w for w in reversed(ways)}
    return sorted(seen.values(), key=lambda w: -w.gain)


def _settings(own: Recipe, stack: Stack) -> Iterator[list[tuple[str, Recipe]]]:
    """One setting of the job's own layout changed: by kind, everything that it may become."""
    yield [(f"microbatch {m}", replace(own, microbatch=m)) for m in MICROBATCHES if m != own.microbatch]
    if own.recompute == "full":
        yield [("no recomputation", replace(own, recompute="none"))]
    else:
        yield [("full recomputation", replace(own, recompute="full"))]
    if not own.compiled:
        yield [("compile = true", replace(own, compiled=True))]
    if own.reshard:
        yield [("reshard_after_forward = false", replace(own, reshard=False))]
    if able(own, stack):
        other = replace(own, async_tensor=not own.async_tensor)
        yield [(difference(own, other), other)]
    shapes = [replace(own, schedule=s, stages_per_rank=n) for s, n in _schedules(own)]
    yield [(difference(own, r), r) for r in shapes]


def _schedules(own: Recipe) -> Iterator[tuple[str, int]]:
    if own.pipeline == 1:
        return
    kinds = [("1f1b", 1), *(("interleaved-1f1b", n) for n in STAGES_PER_RANK), ("zero-bubble", 2)]
    yield from (k for k in kinds if k != (own.schedule, own.stages_per_rank))


def _tuned(asker: _Asker, recipe: Recipe, stack: Stack) -> tuple[Recipe, Prediction] | None:
    """The fastest settings of a layout on this stack."""
    shapes = [(recipe.schedule, recipe.stages_per_rank), *_schedules(recipe)]
    tried = (
        replace(recipe, microbatch=m, recompute=again, reshard=shard, schedule=schedule, stages_per_rank=n)
        for m in MICROBATCHES
        for again in ("none", "full")
        for shard in ((True, False) if recipe.pipeline == 1 else (False,))
        for schedule, n in shapes
    )
    able = [(r, p) for r in tried if (p := asker.ask(r, stack=stack)) is not None]
    return min(able, key=lambda pair: pair[1].step_s, default=None)


def _turns(asker: _Asker, listed: Sequence[Recipe]) -> Iterator[Turn]:
    """Of the listed layouts, each in the settings that are best as things are."""
    if len(listed) < 2:
        return
    cluster = asker.cluster
    network, gpu = cluster.network, cluster.gpu
    if network is not None and cluster.nodes > 1:

        def slower(factor: float) -> Cluster:
            assert network is not None
            return replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor))

        yield from _turn(
            asker, listed, "network", "Gb/s a GPU", network.gb_s_per_gpu * 8, slower, (0.25, 4.0)
        )
    if cluster.gpus_per_node > 1:
        yield from _turn(
            asker,
            listed,
            "node links",
            "GB/s one direction",
            gpu.link_gb_s,
            lambda f: replace(cluster, gpu=replace(gpu, link_gb_s=gpu.link_gb_s * f)),
            (0.25, 4.0),
        )
    yield from _turn(
        asker,
        listed,
        "GPU memory",
        "GB",
        gpu.hbm_gb,
        lambda f: replace(cluster, gpu=replace(gpu, hbm_gb=gpu.hbm_gb * f)),
        (0.25,),
    )


def _turn(
    asker: _Asker,
    listed: Sequence[Recipe],
    what: str,
    unit: str,
    now: float,
    at: Callable[[float], Cluster],
    directions: Sequence[float],
) -> Iterator[Turn]:
    def best(factor: float) -> Recipe | None:
        """The layout that is best as things are stays so until another is ahead of it by more than predictions can tell."""
        there = at(factor)
        able = [(p.step_s, i) for i, r in enumerate(listed) if (p := asker.ask(r, cluster=there))]
        if not able:
            return None
        first = {i: s for s, i in able}.get(0)
        fastest, i = min(able)
        return listed[0] if first is not None and first <= fastest * (1 + ALIKE) else listed[i]

    for step in directions:
        same, other = 1.0, step
        while best(other) == listed[0] and 1 / FURTHEST < other < FURTHEST:
            same, other = other, other * step
        becomes = best(other)
        if becomes == listed[0]:
            yield Turn(what, unit, now, None, None)
            continue
        for _ in range(7):
            middle = (same * other) ** 0.5
            same, other = (middle, other) if best(middle) == listed[0] else (same, middle)
        yield Turn(what, unit, now, now * other, best(other))


def _pair(recipe: Recipe) -> tuple[int, int]:
    return recipe.tensor, recipe.pipeline


def short(recipe: Recipe) -> str:
    """TP8 PP2 FSDP8, as the field writes layouts; with replicas "FSDP8 DP4", with several stages a rank "PP2x4",
    "TP8 async" with communication behind products.
    """
    stages = f"x{recipe.stages_per_rank}" if recipe.stages_per_rank > 1 else ""
    behind = " async" if recipe.async_tensor and recipe.tensor > 1 else ""
    words = [f"TP{recipe.tensor}{behind}", f"PP{recipe.pipeline}{stages}", f"FSDP{recipe.shard}"]
    if recipe.replicate > 1:
        words.append(f"DP{recipe.replicate}")
    return " ".join(words)


def difference(a: Recipe, b: Recipe) -> str:
    """What `b` has that `a` has not, in the words of the job file."""
    told = [
        f"{name} {getattr(b, name)}"
        for name in ("tensor", "pipeline", "shard", "replicate")
        if getattr(a, name) != getattr(b, name)
    ]
    if a.microbatch != b.microbatch:
        told.append(f"microbatch {b.microbatch}")
    if (a.schedule, a.stages_per_rank) != (b.schedule, b.stages_per_rank):
        told.append(
            b.schedule + (f" with {b.stages_per_rank} stages a rank" if b.stages_per_rank > 1 else "")
        )
    if a.recompute != b.recompute:
        told.append("full recomputation" if b.recompute == "full" else "no recomputation")
    if a.reshard != b.reshard:
        told.append(f"reshard_after_forward = {str(b.reshard).lower()}")
    if a.async_tensor != b.async_tensor:
        told.append(f"async_tensor = {str(b.async_tensor).lower()}")
    if a.compiled != b.compiled:
        told.append("compile = true" if b.compiled else "compile = false")
    return ", ".join(told) or "nothing"
