"""Every legal layout of a job on a cluster, predicted: the best, runners-up, why, and what the user's own costs against it.

Legal is what the rules of the job file allow (`job.rules_layout`), so nothing is proposed that our trainer refuses. Searched are
tensor, pipeline, stages per rank, schedule, replicate, shard, microbatch, recomputation and resharding; model, global batch,
sequence, precision and compilation are the job's.
"""

from __future__ import annotations

from collections import Counter
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
    tried: int  # legal layouts
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
    for recipe in legal(job, cluster, refused, microbatches, recomputes):
        tried += 1
        needs = memory(model, recipe, stack_for(recipe, stack)).reserved
        least = min(least, needs)
        if needs > room:
            too_large += 1
            continue
        found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
        key = (recipe.tensor, recipe.pipeline)
        if key not in choices or found.step_s < choices[key].prediction.step_s:
            choices[key] = Choice(recipe, found, limit(found, room))
        if found.verdict.sure and (key not in sure or found.step_s < sure[key].prediction.step_s):
            sure[key] = Choice(recipe, found, limit(found, room))
    mine = None
    if own and job.layout.world_size == cluster.gpus:
        recipe = Recipe.of(job)
        found = predict(model, recipe, cluster, calibration=calibration, stack=stack)
        mine = Choice(recipe, found, limit(found, room))
        # It may have a microbatch or a number of stages that is not among those searched.
        key = (recipe.tensor, recipe.pipeline)
        if found.fits and (key not in choices or found.step_s < choices[key].prediction.step_s):
            choices[key] = mine
        if found.verdict.sure and (key not in sure or found.step_s < sure[key].prediction.step_s):
            sure[key] = mine
    return Found(_ranked(choices), mine, tried, too_large, dict(refused), least, _ranked(sure))


def _ranked(choices: dict[tuple[int, int], Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(choices.values(), key=lambda c: c.prediction.step_s))


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
    """What the rules allow, for all of `cluster`; what they refuse is counted in `refused`."""
    base = Recipe.of(job)
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
        if _refuses(job, cluster, layout, micro, reshard, refused):
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


def _refuses(
    job: Job, cluster: Cluster, layout: Layout, micro: int, reshard: bool, refused: Counter[str]
) -> bool:
    """Whether a rule of the job file refuses it."""
    finding = refusal(job, cluster, layout, microbatch=micro, reshard=reshard)
    if finding is None:
        return False
    refused[finding.keys[0]] += 1
    return True
