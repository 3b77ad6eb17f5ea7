"""Search all legal layouts of a job on a cluster: the best, runners-up, their limits, and the job's own for comparison.

Legal is what the rules of the job file allow (`job.rules_layout`). The search varies tensor, pipeline, stages per rank,
schedule, replicate, shard, microbatch, recomputation, resharding, asynchronous tensor parallel and, if the job leaves it
open, gradient accumulation; model, global batch, sequence, precision and compilation are the job's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors
from seatrial.job.schedules import SCHEDULES, schedule_named
from seatrial.job.settled import reopened
from seatrial.plan.cost.accumulate import accumulate_options, adapted
from seatrial.plan.cost.calibration import ROWS, Calibration
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.overlap import OURS, can_overlap, overlaps
from seatrial.plan.cost.predict import Prediction, capacity, predict, stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe, Recompute
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.step_lower_bound import StepLowerBound

MICROBATCHES = (1, 2, 4, 8, 16, 32)
# Kinds of recomputation, and in one of how many layers of a stage; from the fastest to the one that saves most.
RECOMPUTES: tuple[tuple[Recompute, int], ...] = (
    ("none", 1),
    ("selective", 2),
    ("selective", 1),
    ("full", 2),
    ("full", 1),
)
STAGES_PER_RANK = (2, 4)
CONTEXTS = (2, 4, 8, 16)
# The same configuration differs by this much between releases: closer layouts count as equally fast.
TIE_MARGIN = ROWS
# A layout that needs more than this many times the memory of a GPU is not considered further.
MOST_OVER = 2.0
LEAST_TOKENS = 8192  # of a sequence on one rank: shorter ones need no context parallel

# After `parallel = "auto"` the plan searches the same layouts again.
predicted = lru_cache(maxsize=1 << 13)(predict)


@dataclass(frozen=True)
class Choice:
    """One layout, its prediction, and its largest loss."""

    recipe: Recipe
    prediction: Prediction
    limit: str


@dataclass(frozen=True)
class Found:
    """Choices from best to worst, at most one for each pair of tensor and pipeline sizes."""

    choices: tuple[Choice, ...]
    own: Choice | None  # the job's layout, if it has as many ranks as the cluster has GPUs
    # Legal layouts without and with full recomputation, each counted once for all values of `async_tensor` and `accumulate`,
    # and under a pipeline without `reshard_after_forward`, which saves nothing there.
    tried: int
    too_large: int  # of them, those that do not fit
    refused: dict[str, int]  # combinations that a rule refuses, by its key
    least_bytes: float  # least memory on a GPU of all layouts
    sure: tuple[Choice, ...] = ()  # as `choices`, of layouts that fit with margin
    # Of those tried, which do not fit, but need at most `MOST_OVER` times the available memory.
    outsized: tuple[Recipe, ...] = ()

    @property
    def own_costs(self) -> float | None:
        """Step time of the job's own layout over that of the best one, minus 1."""
        if self.own is None or not self.choices:
            return None
        return self.own.prediction.step_s / self.choices[0].prediction.step_s - 1


def search(
    job: Job,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    own: bool = True,
    stack: str | Stack = "seatrial",
    microbatches: Sequence[int] = MICROBATCHES,
    recomputes: Sequence[tuple[Recompute, int]] = RECOMPUTES,
) -> Found:
    """Search all layouts on the whole cluster. Raises UnknownNetworkError, UnknownSpeedError."""
    model = job.architecture
    refused: Counter[str] = Counter()
    choices: dict[tuple[int, int], Choice] = {}
    sure: dict[tuple[int, int], Choice] = {}
    outsized: list[Recipe] = []
    tried = too_large = 0
    least = float("inf")
    available = capacity(cluster)
    lower_bound = StepLowerBound(model, cluster, stack, calibration)
    # Layouts that fit: a lower bound of the step time, and whether they do with margin.
    fitting: list[tuple[float, bool, Recipe]] = []

    def take(recipe: Recipe, found: Prediction) -> None:
        key = pair(recipe)
        for kept in (choices, sure) if found.verdict.sure else (choices,):
            if key not in kept or found.step_s < kept[key].prediction.step_s:
                kept[key] = Choice(recipe, found, limit(found, available))

    def bar(recipe: Recipe, with_margin: bool = True) -> float:
        """Seconds of the step to beat for a layout that fits with or without margin."""
        best = (sure if with_margin else choices).get(pair(recipe))
        return math.inf if best is None else best.prediction.step_s

    def ways(recipe: Recipe) -> Iterator[Recipe]:
        """Without asynchronous tensor parallel, and with it. It does not save memory: what does not fit without does not with it."""
        yield recipe
        if can_overlap(recipe, stack_for(recipe, stack)):
            yield replace(recipe, async_tensor=True)

    def slower(recipe: Recipe, most: float) -> bool:
        return lower_bound(recipe) >= most or lower_bound.closer(recipe) >= most

    def consider(recipe: Recipe, with_margin: bool) -> None:
        """Predict a layout, which fits with or without margin, if it may be the fastest."""
        if slower(recipe, bar(recipe, with_margin)):
            return
        if recipe.async_tensor and refusal(job, cluster, recipe) is not None:
            return
        found = predicted(model, recipe, cluster, calibration=calibration, stack=stack)
        if found.fits:
            take(recipe, found)

    either = reopened(job)
    # The least and the most recomputation decide what fits. What lies between is tried where it can be the fastest.
    ends, between = tuple(dict.fromkeys((recomputes[0], recomputes[-1]))), recomputes[1:-1]
    # Layouts for that: a lower bound of the step time without recomputation.
    partly: list[tuple[float, Recipe]] = []
    roomy: Recipe | None = None  # the last layout that fits with margin as it is
    for layout in legal(job, cluster, refused, microbatches, ends, stack):
        tried += 1
        # Recomputation only saves memory: it is needless if the layout fits with margin without it.
        needless = roomy is not None and roomy == replace(layout, recompute="none")
        fits = False
        for place, recipe in enumerate(accumulate_options(either, layout, stack)):
            needs = memory(model, recipe, stack_for(recipe, stack)).reserved
            least = min(least, needs)
            if needs > available:
                if needs <= MOST_OVER * available:
                    outsized.append(recipe)
                continue
            fits = True
            if needless:
                break
            with_margin = judge(needs, available).sure
            fitting += ((lower_bound(way), with_margin, way) for way in ways(recipe))
            if with_margin:
                if not place:
                    roomy = layout
                break  # the other value only saves memory
        too_large += not fits
        if fits and not needless and between and (layout.recompute, layout.recompute_every) == ends[-1]:
            plain = replace(layout, recompute="none")
            least_s = min(
                lower_bound(way) for r in accumulate_options(either, plain, stack) for way in ways(r)
            )
            partly.append((least_s, plain))
    for _, with_margin, recipe in sorted(fitting, key=lambda entry: entry[0]):
        consider(recipe, with_margin)
    # With any of these a step takes longer than without, and the slower one needs less memory.
    for least_s, layout in sorted(partly, key=lambda entry: entry[0]):
        if least_s >= bar(layout):
            continue
        kinds = recomputes_of(between, layout.layout.schedule, stack)
        for plain in accumulate_options(either, layout, stack):
            options = list(_recomputing(job, plain, kinds))
            if not options or all(slower(way, bar(plain)) for way in ways(options[0])):
                continue
            for recipe in reversed(options):
                needs = memory(model, recipe, stack_for(recipe, stack)).reserved
                if needs > available:
                    break
                for way in ways(recipe):
                    consider(way, judge(needs, available).sure)
    mine = None
    if own and job.layout.world_size == cluster.gpus:
        recipe = own_recipe(job, available, stack)
        found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
        mine = Choice(recipe, found, limit(found, available))
        # Its microbatch or number of stages may not be among those searched.
        if found.fits:
            take(recipe, found)
    return Found(
        _ranked(choices), mine, tried, too_large, dict(refused), least, _ranked(sure), tuple(outsized)
    )


def pair(recipe: Recipe) -> tuple[int, int]:
    """Tensor and pipeline size: the best layout of each pair is shown."""
    return recipe.layout.tensor, recipe.layout.pipeline


def _ranked(choices: dict[tuple[int, int], Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(choices.values(), key=lambda c: c.prediction.step_s))


def own_recipe(job: Job, available: float | None, stack: str | Stack = "seatrial") -> Recipe:
    """The job's own layout on a stack, for `available` bytes on a GPU and without settings that the stack does not have."""
    recipe = adapted(job, Recipe.of(job), available, stack)
    return replace(recipe, async_tensor=overlaps(recipe, stack_for(recipe, stack)))


def limit(found: Prediction, available: float) -> str:
    """The largest loss of a layout, as text."""
    if found.memory.reserved > available:
        return "memory: it does not fit"
    worst = max(found.waterfall[1:], key=lambda s: s.share)
    return f"{worst.name}: {worst.share:.0%} of the step"


def legal(
    job: Job,
    cluster: Cluster,
    refused: Counter[str],
    microbatches: Sequence[int] = MICROBATCHES,
    recomputes: Sequence[tuple[Recompute, int]] = RECOMPUTES,
    stack: str | Stack = "seatrial",
) -> Iterator[Recipe]:
    """Legal layouts on all of `cluster`, without asynchronous tensor parallel; counts refused ones in `refused`."""
    base = replace(Recipe.of(job), async_tensor=False, recompute="none", recompute_every=1)
    for tensor in tensors(job, cluster):
        for pipeline in divisors(cluster.gpus // tensor, most=cluster.gpus):
            ranks = cluster.gpus // tensor // pipeline
            splits = product(contexts(base, stack, ranks), schedules(pipeline))
            for context, (schedule, per_rank) in splits:
                data = ranks // context
                kinds = recomputes_of(recomputes, schedule, stack)
                at = replace(base, context=context)
                for replicate in divisors(data, most=data):
                    layout = Layout(pipeline, replicate, data // replicate, tensor, per_rank, schedule)
                    for micro in microbatches:
                        yield from _variants(job, cluster, at, layout, micro, refused, kinds)


def recomputes_of(
    recomputes: Sequence[tuple[Recompute, int]], schedule: str, stack: str | Stack
) -> list[tuple[Recompute, int]]:
    """Those of `recomputes` to try with a stack and a pipeline schedule."""
    if (stack if isinstance(stack, str) else stack.name) not in OURS:
        return [(kind, every) for kind, every in recomputes if kind != "selective" and every == 1]
    if schedule_named(schedule).split_backward:  # the rules refuse `selective`
        return [(kind, every) for kind, every in recomputes if kind != "selective"]
    if ("selective", 1) not in recomputes:
        return list(recomputes)
    # It saves about as much as `full` in every second layer, in less time.
    return [(kind, every) for kind, every in recomputes if kind != "full" or every == 1]


def contexts(recipe: Recipe, stack: str | Stack, ranks: int) -> list[int]:
    """Context-parallel sizes to try for `ranks` that are otherwise data parallel."""
    if not stack_for(recipe, stack).context_parallel:
        return [1]
    most = recipe.sequence // LEAST_TOKENS
    return [1, *(c for c in CONTEXTS if c <= most and ranks % c == 0)]


def tensors(job: Job, cluster: Cluster) -> list[int]:
    """Tensor sizes to try: divisors of a node, and larger ones within a domain that divide the model's heads."""
    a, each = job.architecture, cluster.gpus_per_node
    whole = [t for t in divisors(cluster.gpus, most=cluster.domain_gpus) if t > each and t % each == 0]
    heads = math.gcd(a.num_attention_heads, a.num_key_value_heads)
    return divisors(each) + [t for t in whole if heads % t == 0]


def schedules(pipeline: int) -> Iterator[tuple[str, int]]:
    """(schedule, stages a rank) that can be the best. gpipe needs more memory than 1f1b and is not faster."""
    yield "1f1b", 1
    if pipeline > 1:
        for schedule in SCHEDULES.own.values():
            if schedule.several_stages:
                yield from ((schedule.name, per_rank) for per_rank in STAGES_PER_RANK)


def _variants(
    job: Job,
    cluster: Cluster,
    base: Recipe,
    layout: Layout,
    micro: int,
    refused: Counter[str],
    recomputes: Sequence[tuple[Recompute, int]],
) -> Iterator[Recipe]:
    """Each combination of recomputation and resharding that the rules allow.

    Under torch's pipeline resharding saves no memory (`memory`) and gathers weights again (`gathers_a_step`).
    """
    compiled = job.compiles(job.cluster.device, layout)
    for reshard in (True, False) if layout.pipeline == 1 else (False,):
        recipe = replace(base, layout=layout, microbatch=micro, reshard=reshard, compiled=compiled)
        finding = refusal(job, cluster, recipe)
        if finding is not None:
            refused[finding.keys[0]] += 1
            continue
        yield from _recomputing(job, recipe, recomputes)


def _recomputing(job: Job, recipe: Recipe, recomputes: Sequence[tuple[Recompute, int]]) -> Iterator[Recipe]:
    """`recipe` with each of `recomputes` that differs in stages of so many layers."""
    layers = job.architecture.num_hidden_layers // recipe.layout.stages
    for kind, every in recomputes:
        if every == 1 or every <= layers:
            yield replace(recipe, recompute=kind, recompute_every=every)
