"""Changes that would improve a prediction or alter the choice, and whether a target is reachable; each is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors
from seatrial.job.ring import ALWAYS, NEVER
from seatrial.job.schedules import schedule_named
from seatrial.job.schema import Accumulate
from seatrial.plan.cost.calibration import Calibration
from seatrial.plan.cost.collectives import UnknownNetworkError
from seatrial.plan.cost.finish import Finish
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.overlap import OURS, can_overlap
from seatrial.plan.cost.predict import Prediction, Share, capacity, predict, stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import (
    MICROBATCHES,
    RECOMPUTES,
    STAGES_PER_RANK,
    TIE_MARGIN,
    Found,
    contexts,
    pair,
    recomputes_of,
    schedules,
)

# Smaller gains are not reported.
_WORTH = 0.01
# The stack that represents other software: with the most overlap of those with published results on many GPUs.
OTHER = "nemo"
FURTHEST = 64.0  # a crossover is searched within this factor of the present value

Reached = Literal["yes", "inside", "no"]
"""A target is met by the prediction, only within its interval, or not at all."""


@dataclass(frozen=True)
class TargetValue:
    """A target value: tokens/s of one GPU, a share of the peak (MFU), or seconds from the first step to the end."""

    value: float
    of: Literal["tokens/s/GPU", "MFU", "end"]

    def by(self, p: Prediction) -> Reached:
        """Whether a prediction reaches it, except an end (`Target.speed`). With an unknown peak, MFU is not reached."""
        assert self.of != "end"
        here = p.tokens_per_s_per_gpu if self.of == "tokens/s/GPU" else (p.mfu or 0.0)
        if here >= self.value:
            return "yes"
        return "inside" if here * p.step_s / p.low_s >= self.value else "no"


@dataclass(frozen=True)
class Suggestion:
    """One change and its predicted effect. `built`: whether this trainer has it today."""

    what: str
    recipe: Recipe
    prediction: Prediction
    gain: float  # speedup over the job's own layout, minus 1
    built: bool = True


@dataclass(frozen=True)
class Crossover:
    """The value of one hardware property at which another of the listed layouts becomes the best."""

    what: str
    unit: str
    now: float
    at: float | None  # None: there is none within a factor of FURTHEST
    becomes: Recipe | None


@dataclass(frozen=True)
class Advice:
    """Suggestions by gain, largest first; crossovers of the choice."""

    suggestions: tuple[Suggestion, ...]
    crossovers: tuple[Crossover, ...]
    alike: tuple[Recipe, ...]  # as fast as the best, but for `TIE_MARGIN`


@dataclass(frozen=True)
class Target:
    """A target, and the first suggestion that would meet it: within its interval, or by its prediction.

    For an end: `likely`, the probability that the run ends by then, or `why_not`; also with the best suggestion that is built.
    """

    wanted: TargetValue
    speed: TargetValue  # the required speed: `wanted` itself, or the speed that ends just in time
    own: Reached
    inside: Suggestion | None
    met: Suggestion | None
    likely: float | None = None
    why_not: str = ""
    better: Suggestion | None = None
    likely_with: float | None = None  # with `better`


@dataclass(frozen=True)
class Predictor:
    """Predicts other recipes of a job."""

    job: Job
    cluster: Cluster
    stack: str | Stack
    calibration: Calibration | None

    def predict(
        self, recipe: Recipe, *, cluster: Cluster | None = None, stack: str | None = None
    ) -> Prediction:
        """The prediction, whether it fits or not. Raises UnknownNetworkError, UnknownSpeedError."""
        model, at = self.job.architecture, cluster or self.cluster
        return predict(model, recipe, at, stack=stack or self.stack, calibration=self.calibration)

    def try_predict(
        self, recipe: Recipe, *, cluster: Cluster | None = None, stack: str | None = None
    ) -> Prediction | None:
        """The prediction; None if the rules refuse it, it does not fit, or a speed is not known."""
        at = cluster or self.cluster
        needs = memory(self.job.architecture, recipe, stack_for(recipe, stack or self.stack)).reserved
        if needs > capacity(at) or refusal(self.job, at, recipe) is not None:
            return None
        try:
            return self.predict(recipe, cluster=cluster, stack=stack)
        except (UnknownNetworkError, UnknownSpeedError):
            return None


def advice(
    job: Job,
    own: Recipe,
    base: Prediction,
    cluster: Cluster,
    found: Found | None,
    stack: str | Stack = "seatrial",
    calibration: Calibration | None = None,
) -> Advice:
    """Advice about `own`, whose prediction is `base`, and about the best of `found`."""
    predictor = Predictor(job, cluster, stack, calibration)
    listed = found.choices if found is not None else ()
    best = listed[0].prediction.step_s if listed else 0.0
    alike = tuple(c.recipe for c in listed[1:] if c.prediction.step_s <= best * (1 + TIE_MARGIN))
    suggestions, crossovers = (
        _suggestions(predictor, own, base, found),
        _crossovers(predictor, [c.recipe for c in listed]),
    )
    return Advice(tuple(suggestions), tuple(crossovers), alike)


def targets(
    base: Prediction, suggestions: Sequence[Suggestion], wishes: Sequence[TargetValue], end: Finish | None
) -> Iterator[Target]:
    """Each target compared with the job's own layout, and the smallest changes that would meet it, built ones first.

    Without an `end`, because saves and failures leave no time to train, no speed is enough.
    """
    by_size = sorted(suggestions, key=lambda w: (not w.built, w.gain))
    for wish in wishes:
        speed = wish
        if wish.of == "end":
            times = math.inf if end is None else end.wall_s / wish.value
            speed = TargetValue(base.tokens_per_s_per_gpu * times, "tokens/s/GPU")
        inside, met = (
            next((w for w in by_size if speed.by(w.prediction) == reached), None)
            for reached in ("inside", "yes")
        )
        found = Target(wish, speed, speed.by(base), inside, met)
        if wish.of == "end" and end is None:
            found = replace(found, why_not="saving and failures leave no time to train")
        elif wish.of == "end" and end is not None:
            best = max((w for w in suggestions if w.built), key=lambda w: w.gain, default=None)
            found = replace(found, better=best, **_likely(base, best, wish.value, end))
        yield found


def _likely(base: Prediction, best: Suggestion | None, seconds: float, end: Finish) -> dict[str, Any]:
    values: dict[str, Any] = {"why_not": "" if base.fits else "the layout does not fit"}
    if base.fits:
        values["likely"] = end.within(seconds, base.pace.spread)
    if best is not None:
        p = best.prediction
        values["likely_with"] = end.within(seconds, p.pace.spread, base.step_s / p.step_s)
    return values


def excess(p: Prediction, best: Prediction) -> Share | None:
    """The part of a step with the largest excess over the best layout, as that excess; None if there is none."""
    parts = [
        Share(a.name, (a.seconds - b.seconds) / p.step_s, a.seconds - b.seconds)
        for a, b in zip(p.waterfall[1:], best.waterfall[1:], strict=True)
    ]
    worst = max(parts, key=lambda s: s.seconds)
    return worst if worst.seconds > 0 else None


def _suggestions(
    predictor: Predictor, own: Recipe, base: Prediction, found: Found | None
) -> list[Suggestion]:
    suggestions: list[Suggestion] = []

    def add(what: str, recipe: Recipe, p: Prediction | None, *, built: bool = True) -> None:
        if p is None:
            return
        gain = base.step_s / p.step_s - 1
        if base.fits and gain < _WORTH:
            return
        suggestions.append(Suggestion(what, recipe, p, gain, built))

    for kind in single_changes(own, stack_for(own, predictor.stack)):
        tried = [(what, r, p) for what, r in kind if (p := predictor.try_predict(r)) is not None]
        if tried:
            add(*min(tried, key=lambda t: t[2].step_s))
    mine = None
    if found is not None and found.choices:
        best = found.choices[0]
        mine = next((c for c in found.choices if pair(c.recipe) == pair(own)), None)
        if mine is not None and mine is not best and mine.recipe != own:
            add("the best with the same TP and PP", mine.recipe, mine.prediction)
        if best.recipe != own:
            add("the best layout", best.recipe, best.prediction)
    plain = replace(own, async_tensor=False, accumulate="whole", offload=False)
    if (
        stack_for(own, predictor.stack).name != OTHER
        and (tuned := _tuned(predictor, plain, OTHER)) is not None
    ):
        changed = "" if tuned[0] == plain else f", {difference(plain, tuned[0])}"
        add(f"{OTHER} instead{changed}", *tuned, built=False)
    network = predictor.cluster.network
    if network is not None and predictor.cluster.several_domains:
        twice = replace(predictor.cluster, network=replace(network, gbps_per_nic=2 * network.gbps_per_nic))
        add("a network twice as fast", own, predictor.try_predict(own, cluster=twice), built=False)
    # Of suggestions with the same recipe and time the first, the smaller change, is kept.
    seen = {(w.recipe, w.prediction.step_s): w for w in reversed(suggestions)}
    return sorted(seen.values(), key=lambda w: -w.gain)


def single_changes(own: Recipe, stack: Stack) -> Iterator[list[tuple[str, Recipe]]]:
    """Changes of one setting of a layout: by setting, every possible value."""
    yield [(f"microbatch {m}", replace(own, microbatch=m)) for m in MICROBATCHES if m != own.microbatch]
    kinds = recomputes_of(RECOMPUTES, own.layout.schedule, stack)
    others = [replace(own, recompute=kind, recompute_every=every) for kind, every in kinds]
    yield [(r.recomputation, r) for r in others if r != own]
    if own.recompute == "full" and stack.name in OURS:
        other = replace(own, offload=not own.offload)
        yield [(difference(own, other), other)]
    if not own.compiled:
        yield [("compile = true", replace(own, compiled=True))]
    if own.shard_ranks > 1:
        other = replace(own, reshard=not own.reshard)
        yield [(difference(own, other), other)]
    if can_overlap(own, stack):
        other = replace(own, async_tensor=not own.async_tensor)
        yield [(difference(own, other), other)]
    if own.context > 1 and stack.name in OURS:
        other = replace(own, ring=NEVER if own.rings else ALWAYS)
        yield [(difference(own, other), other)]
    if own.microbatches > 1 and stack.name in OURS:
        values: tuple[Accumulate, ...] = ("whole", "sharded")
        others = [replace(own, accumulate=how) for how in values if how != own.accumulate]
        yield [(difference(own, r), r) for r in others]
    data = own.layout.data_parallel
    split = [replace(own.layout, shard=n, replicate=data // n) for n in divisors(data, most=data)]
    yield [(difference(own, r), r) for at in split if (r := replace(own, layout=at)) != own]
    shapes = [replace(own, layout=layout) for layout in _schedules(own.layout)]
    yield [(difference(own, r), r) for r in shapes]


def _schedules(layout: Layout) -> Iterator[Layout]:
    """The same sizes under other schedules."""
    if layout.pipeline == 1:
        return
    for schedule, n in schedules(layout.pipeline):
        other = replace(layout, schedule=schedule, stages_per_rank=n)
        # A split backward pass needs more memory for weight gradients, so it is tried with the fewest stages.
        tried = n <= STAGES_PER_RANK[0] or not schedule_named(schedule).split_backward
        if tried and other != layout:
            yield other


def _tuned(predictor: Predictor, recipe: Recipe, stack: str) -> tuple[Recipe, Prediction] | None:
    """The fastest settings of a layout on this stack."""
    ranks = recipe.shard_ranks
    tried = (
        replace(at, microbatch=m, recompute=kind, recompute_every=every, reshard=shard, layout=layout)
        for at in (
            replace(recipe, context=c, layout=replace(recipe.layout, shard=ranks // c))
            for c in contexts(recipe, stack, ranks)
        )
        for m in MICROBATCHES
        for kind, every in recomputes_of(RECOMPUTES, recipe.layout.schedule, stack)
        for shard in ((True, False) if recipe.layout.pipeline == 1 else (False,))
        for layout in (at.layout, *_schedules(at.layout))
    )
    able = [(r, p) for r in tried if (p := predictor.try_predict(r, stack=stack)) is not None]
    return min(able, key=lambda pair: pair[1].step_s, default=None)


def _crossovers(predictor: Predictor, listed: Sequence[Recipe]) -> Iterator[Crossover]:
    """Crossovers between the listed layouts, each with its currently best settings."""
    if len(listed) < 2:
        return
    cluster = predictor.cluster
    network, gpu = cluster.network, cluster.gpu
    if network is not None and cluster.several_domains:

        def slower(factor: float) -> Cluster:
            assert network is not None
            return replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor))

        yield from _crossover(
            predictor, listed, "network", "Gb/s a GPU", network.gb_s_per_gpu * 8, slower, (0.25, 4.0)
        )
    if cluster.gpus_per_node > 1:
        yield from _crossover(
            predictor,
            listed,
            "node links",
            "GB/s one direction",
            gpu.link_gb_s,
            lambda f: replace(cluster, gpu=replace(gpu, link_gb_s=gpu.link_gb_s * f)),
            (0.25, 4.0),
        )
    yield from _crossover(
        predictor,
        listed,
        "GPU memory",
        "GB",
        gpu.hbm_gb,
        lambda f: replace(cluster, gpu=replace(gpu, hbm_gb=gpu.hbm_gb * f)),
        (0.25,),
    )


def _crossover(
    predictor: Predictor,
    listed: Sequence[Recipe],
    what: str,
    unit: str,
    now: float,
    at: Callable[[float], Cluster],
    directions: Sequence[float],
) -> Iterator[Crossover]:
    @cache
    def best(factor: float) -> Recipe | None:
        """The best layout; the current one stays until another is faster by more than `TIE_MARGIN`."""
        there = at(factor)
        able = [(p.step_s, i) for i, r in enumerate(listed) if (p := predictor.try_predict(r, cluster=there))]
        if not able:
            return None
        first = {i: s for s, i in able}.get(0)
        fastest, i = min(able)
        return listed[0] if first is not None and first <= fastest * (1 + TIE_MARGIN) else listed[i]

    for step in directions:
        same, other = 1.0, step
        while best(other) == listed[0] and 1 / FURTHEST < other < FURTHEST:
            same, other = other, other * step
        becomes = best(other)
        if becomes == listed[0]:
            yield Crossover(what, unit, now, None, None)
            continue
        for _ in range(7):
            middle = (same * other) ** 0.5
            same, other = (middle, other) if best(middle) == listed[0] else (same, middle)
        yield Crossover(what, unit, now, now * other, best(other))


def short(recipe: Recipe) -> str:
    """TP8 PP2 FSDP8, the usual notation of layouts; with replicas "FSDP8 DP4", with several stages a rank "PP2x4",
    "TP8 async" with communication overlapped with products, "CP4 ring" with keys that are not gathered, "FSDP8 EP4" with experts divided among 4 ranks of 8.
    """
    at = recipe.layout
    stages = f"x{at.stages_per_rank}" if at.stages_per_rank > 1 else ""
    behind = " async" if recipe.async_tensor and at.tensor > 1 else ""
    words = [f"TP{at.tensor}{behind}", f"PP{at.pipeline}{stages}", f"FSDP{at.shard}"]
    if recipe.context > 1:
        words.insert(1, f"CP{recipe.context}{' ring' if recipe.rings else ''}")
    if at.expert > 1:
        words.append(f"EP{at.expert}")
    if at.replicate > 1:
        words.append(f"DP{at.replicate}")
    return " ".join(words)


def difference(a: Recipe, b: Recipe) -> str:
    """The settings of `b` that differ from `a`, as in the job file."""
    here, there = a.layout, b.layout
    entries = [
        f"{name} {getattr(there, name)}"
        for name in ("tensor", "pipeline", "shard", "expert", "replicate")
        if getattr(here, name) != getattr(there, name)
    ]
    if a.context != b.context:
        entries.append(f"context {b.context}")
    if a.microbatch != b.microbatch:
        entries.append(f"microbatch {b.microbatch}")
    if (here.schedule, here.stages_per_rank) != (there.schedule, there.stages_per_rank):
        many = f" with {there.stages_per_rank} stages a rank" if there.stages_per_rank > 1 else ""
        entries.append(there.schedule + many)
    if (a.recompute, a.recompute_every) != (b.recompute, b.recompute_every):
        entries.append(b.recomputation)
    elif a.offloads != b.offloads:
        entries.append(f"offload_activations = {str(b.offloads).lower()}")
    if a.reshard != b.reshard:
        entries.append(f"reshard_after_forward = {str(b.reshard).lower()}")
    if a.async_tensor != b.async_tensor:
        entries.append(f"async_tensor = {str(b.async_tensor).lower()}")
    if a.rings != b.rings:
        entries.append(f"ring_attention = {str(b.rings).lower()}")
    if a.accumulate != b.accumulate and b.microbatches > 1:
        entries.append(f'accumulate = "{b.accumulate}"')
    if a.compiled != b.compiled:
        entries.append("compile = true" if b.compiled else "compile = false")
    return ", ".join(entries) or "nothing"
