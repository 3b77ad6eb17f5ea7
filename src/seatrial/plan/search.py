"""Every legal layout of a job on a cluster, predicted: the best, runners-up, why, and what the user's own costs against it.

Legal is what the rules of the job file allow (`job.rules_layout`), so nothing is proposed that our trainer refuses. Searched are
tensor, pipeline, stages per rank, schedule, replicate, shard, microbatch, recomputation and resharding, and whether tensor-parallel
communication goes behind products; model, global batch, sequence, precision and compilation are the job's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors
from seatrial.job.rules_layout import MANY_STAGES
from seatrial.plan.calibration import Calibration
from seatrial.plan.cluster import Cluster
from seatrial.plan.legal import refusal
from seatrial.plan.memory import memory
from seatrial.plan.model import Model
from seatrial.plan.overlap import able, copied, cut, overlaps
from seatrial.plan.predict import Prediction, capacity, predict, stack_for
from seatrial.plan.recipe import Recipe, Recompute
from seatrial.plan.stacks import Stack

MICROBATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
STAGES_PER_RANK = (2, 4)


@dataclass(frozen=True)
class Choice:
    """One layout, what it is predicted to do, and what limits it."""

    recipe: Recipe
    prediction: Prediction
    limit: str

    @property
    def layout(self) -> Layout:
        r = self.recipe
        return Layout(r.pipeline, r.replicate, r.shard, r.tensor, r.stages_per_rank, r.schedule)


@dataclass(frozen=True)
class Found:
    """Choices from best to worst, at most one for each pair of tensor and pipeline sizes."""

    choices: tuple[Choice, ...]
    own: Choice | None  # the job's layout, where it has as many ranks
    tried: int  # legal layouts, with asynchronous tensor parallel or without counted once
    too_large: int  # of them, without enough memory
    refused: dict[str, int]  # combinations that a rule refuses, by the key it points at
    least_bytes: float  # what the smallest of all needs on a GPU
    sure: tuple[Choice, ...] = ()  # as `choices`, of the layouts that surely fit alone

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
    recomputes: Sequence[Recompute] = RECOMPUTES,
) -> Found:
    """All layouts on the whole cluster. Raises UnknownNetworkError, UnknownSpeedError."""
    model = Model.of(job.architecture)
    refused: Counter[str] = Counter()
    choices: dict[tuple[int, int], Choice] = {}
    sure: dict[tuple[int, int], Choice] = {}
    tried = too_large = 0
    least = float("inf")
    room = capacity(cluster)
    # Of each pair of sizes, layouts that asynchronous tensor parallel could make faster, and below what no step of theirs comes.
    waiting: defaultdict[tuple[int, int], list[tuple[float, Recipe]]] = defaultdict(list)

    def take(recipe: Recipe, found: Prediction) -> None:
        key = (recipe.tensor, recipe.pipeline)
        for kept in (choices, sure) if found.verdict.sure else (choices,):
            if key not in kept or found.step_s < kept[key].prediction.step_s:
                kept[key] = Choice(recipe, found, limit(found, room))

    for recipe in legal(job, cluster, refused, microbatches, recomputes):
        tried += 1
        needs = memory(model, recipe, stack_for(recipe, stack)).reserved
        least = min(least, needs)
        if needs > room:
            too_large += 1
            continue
        found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
        take(recipe, found)
        if able(recipe, behaviour := stack_for(recipe, stack)):
            least_s = _least_step(model, recipe, behaviour, found)
            waiting[recipe.tensor, recipe.pipeline].append((least_s, recipe))
    for key, plain in waiting.items():
        for least_s, recipe in sorted(plain, key=lambda pair: pair[0]):
            # It needs no less memory: where nothing is sure without it, nothing is with it.
            if least_s >= max(kept[key].prediction.step_s for kept in (choices, sure) if key in kept):
                break  # nor can any further one be faster
            recipe = replace(recipe, async_tensor=True)
            if _refuses(job, cluster, recipe):
                continue
            found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
            if found.fits:
                take(recipe, found)
    mine = None
    if own and job.layout.world_size == cluster.gpus:
        recipe = own_recipe(job, stack)
        found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
        mine = Choice(recipe, found, limit(found, room))
        # It may have a microbatch or a number of stages that is not among those searched.
        if found.fits:
            take(recipe, found)
    return Found(_ranked(choices), mine, tried, too_large, dict(refused), least, _ranked(sure))


def _ranked(choices: dict[tuple[int, int], Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(choices.values(), key=lambda c: c.prediction.step_s))


def own_recipe(job: Job, stack: str | Stack = "seatrial") -> Recipe:
    """The job's own layout on a stack; another stack than our trainer hides what it hides, whatever the job says."""
    recipe = Recipe.of(job)
    return replace(recipe, async_tensor=overlaps(recipe, stack_for(recipe, stack)))


def _least_step(model: Model, recipe: Recipe, stack: Stack, found: Prediction) -> float:
    """Below this no step with asynchronous tensor parallel comes; `found` is without it.

    It takes from tensor-parallel communication and from copies, and from the bubble, which is made of the same passes. At six of
    a layer's eight places, forward and backward, at least one part stays in sight, and what is hidden slows what hides it.
    """
    p = found.parts
    hidden = (1 - stack.contention) * (1 - 6 / 8 / cut(recipe))
    copies = copied(model, recipe, stack)
    moved = stack.hidden_forward * model.hidden + stack.ffn_forward * model.ffn
    share = copies / (copies + moved * recipe.tokens / recipe.tensor)
    again = 2 if recipe.recompute == "full" else 1
    return found.step_s - hidden * p.tensor - share * again * p.operators - max(hidden, share) * p.bubble


def limit(found: Prediction, room: float) -> str:
    """The largest of the parts that keep a layout from the peak, in words."""
    if found.memory.reserved > room:
        return "memory: it does not fit"
    worst = max(found.waterfall[1:], key=lambda s: s.share)
    return f"{worst.name}: {worst.share:.0%} of the step"


def legal(
    job: Job,
    cluster: Cluster,
    refused: Counter[str],
    microbatches: Sequence[int] = MICROBATCHES,
    recomputes: Sequence[Recompute] = RECOMPUTES,
) -> Iterator[Recipe]:
    """What the rules allow, for all of `cluster`, without asynchronous tensor parallel; what they refuse is counted in `refused`."""
    base = replace(Recipe.of(job), async_tensor=False)
    for tensor in divisors(cluster.gpus_per_node):
        for pipeline in divisors(cluster.gpus // tensor, most=cluster.gpus):
            for schedule, per_rank in _schedules(pipeline):
                data = cluster.gpus // tensor // pipeline
                for replicate in divisors(data, most=data):
                    layout = Layout(pipeline, replicate, data // replicate, tensor, per_rank, schedule)
                    for micro in microbatches:
                        yield from _variants(job, cluster, base, layout, micro, refused, recomputes)


def _schedules(pipeline: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    if pipeline > 1:
        for schedule in MANY_STAGES:
            for per_rank in STAGES_PER_RANK:
                yield schedule, per_rank


def _variants(
    job: Job,
    cluster: Cluster,
    base: Recipe,
    layout: Layout,
    micro: int,
    refused: Counter[str],
    recomputes: Sequence[Recompute],
) -> Iterator[Recipe]:
    """Each way of recomputing and of resharding, where the rules allow them."""
    for reshard in (True, False):
        finding = refusal(job, cluster, layout, microbatch=micro, reshard=reshard)
        if finding is not None:
            refused[finding.keys[0]] += 1
            continue
        for recompute in recomputes:
            yield replace(
                base,
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                shard=layout.shard,
                replicate=layout.replicate,
                stages_per_rank=layout.stages_per_rank,
                schedule=layout.schedule,
                microbatch=micro,
                reshard=reshard,
                recompute=recompute,
            )


def _refuses(job: Job, cluster: Cluster, r: Recipe) -> bool:
    """Whether a rule of the job file refuses it."""
    layout = Layout(r.pipeline, r.replicate, r.shard, r.tensor, r.stages_per_rank, r.schedule)
    found = refusal(
        job, cluster, layout, microbatch=r.microbatch, reshard=r.reshard, async_tensor=r.async_tensor
    )
    return found is not None
