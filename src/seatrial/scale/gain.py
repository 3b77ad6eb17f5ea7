"""Predicted gain of the changes that a cause suggests: predicted speed with the change over that without it.

If speed cannot be predicted, the gain of a smaller pipeline bubble still follows from the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seatrial.job import Job
from seatrial.job.layout import Layout
from seatrial.job.ring import ALWAYS
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Predictor
from seatrial.plan.search.legal import refusal
from seatrial.scale.cause import Cause, Gain, idle_share
from seatrial.scale.observed import Observed

_INTERLEAVED = "interleaved-1f1b"


def gains(
    cause: Cause, job: Job, observed: Observed, predictor: Predictor | None, why: str
) -> tuple[Gain, ...]:
    """The gain of each change to `job` (at this size) that the rules allow and that fits into memory.

    `predictor` predicts for the cluster of this size; None for the reason `why`.
    """
    own, shape = Recipe.of(job), hardware_of(job).shape
    base = None if predictor is None else predictor.try_predict(own)
    found = []
    for name, recipe in _changes(cause, own):
        if refusal(job, shape, recipe) is not None:
            continue
        if predictor is not None and base is not None:
            then = predictor.try_predict(recipe)
            if then is not None:
                more = then.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu - 1
                found.append(Gain(name, more, "predicted by seatrial plan"))
            continue
        more_or_none = _smaller_bubble(recipe, observed) if cause.kind == "bubble" else None
        text = "the measured idle time, scaled by the schedule's"
        found.append(Gain(name, more_or_none, text if more_or_none is not None else why or "not predicted"))
    return tuple(found)


def _changes(cause: Cause, own: Recipe) -> Iterator[tuple[str, Recipe]]:
    """(change as job-file text, recipe with it)."""
    layout = own.layout
    if cause.kind == "bubble":
        yield _batch(own)
        if own.microbatch % 2 == 0:
            half = own.microbatch // 2
            yield f"train.microbatch = {half}", replace(own, microbatch=half)
        if layout.schedule != _INTERLEAVED:
            other = replace(layout, schedule=_INTERLEAVED, stages_per_rank=2)
            yield f'parallel.schedule = "{_INTERLEAVED}", stages_per_rank = 2', replace(own, layout=other)
        if layout.pipeline % 2 == 0:
            yield _smaller(own, "pipeline")
    elif cause.kind in ("communication", "small messages"):
        if cause.dimensions == ("tensor",):
            if layout.tensor % 2 == 0:
                yield _smaller(own, "tensor")
        elif cause.dimensions == ("context",):
            if not own.rings:
                yield "parallel.ring_attention = true", replace(own, ring=ALWAYS)
            if own.context % 2 == 0:
                other = replace(layout, shard=2 * layout.shard)
                name = f"parallel.context = {own.context // 2}, shard = {other.shard}"
                yield name, replace(own, context=own.context // 2, layout=other)
        elif cause.dimensions[0] in ("shard", "replicate"):
            yield _batch(own)
            double = 2 * own.microbatch
            yield f"train.microbatch = {double}", replace(own, microbatch=double)
            if layout.shard % 2 == 0:
                other = replace(layout, shard=layout.shard // 2, replicate=layout.replicate * 2)
                name = f"parallel.shard = {other.shard}, replicate = {other.replicate}"
                yield name, replace(own, layout=other)


def _batch(own: Recipe) -> tuple[str, Recipe]:
    double = 2 * own.global_batch
    return f"train.global_batch = {double}", replace(own, global_batch=double)


def _smaller(own: Recipe, dimension: str) -> tuple[str, Recipe]:
    """Halve a dimension, double the shards."""
    half = getattr(own.layout, dimension) // 2
    layout: Layout = replace(own.layout, **{dimension: half, "shard": 2 * own.layout.shard})
    return f"parallel.{dimension} = {half}, shard = {layout.shard}", replace(own, layout=layout)


def _smaller_bubble(recipe: Recipe, observed: Observed) -> float | None:
    """Gain if only the idle time changes; None if the work of a rank changes too, or is unknown."""
    layout = recipe.layout
    if layout.pipeline != observed.layout.pipeline or observed.microbatches is None:
        return None
    many = recipe.microbatches
    if (
        layout.stages_per_rank > 1 and many % layout.pipeline
    ):  # interleaving needs a multiple of the pipeline size
        return None
    now = idle_share(observed)
    then = idle_share(replace(observed, layout=recipe.job_layout, microbatches=many))
    if not now or then is None:
        return None
    return observed.step_s / (observed.step_s - observed.idle_s * (1 - then / now)) - 1
