"""`accumulate = "auto"`: gradients of microbatches accumulate whole, unless that needs too much memory.

Whole, they are reduced once a step. Sharded, they are reduced in every microbatch (`parallel/shard.py`), and a GPU keeps
its shard instead of 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from seatrial.base import units
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.schema import Accumulate
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.overlap import OURS
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.recipe import Recipe


def chosen(
    model: Architecture, recipe: Recipe, available: float | None, stack: str | Stack = "seatrial"
) -> tuple[Accumulate, str]:
    """The value of `accumulate = "auto"`, and why. `available`: bytes available on a GPU, None if unknown."""
    if recipe.microbatches == 1:
        return "sharded", "there is only one microbatch"
    if why := _no_use(recipe, stack_for(recipe, stack)):
        return "whole", why
    if available is None:
        return "whole", "the memory of a GPU is unknown"
    whole, sharded = (
        memory(model, r, stack_for(r, stack)).reserved
        for r in (replace(recipe, accumulate=how) for how in ("whole", "sharded"))
    )
    needs = f"with whole gradients a GPU needs {units.memory(whole)} of {units.memory(available)}"
    if judge(whole, available).sure:
        return "whole", f"{needs}, which fits"
    word = "tight" if whole <= available else "too much"
    return (
        "sharded",
        f"{needs}, which is {word}; with sharded ones {units.memory(sharded)}",
    )


def adapted(job: Job, recipe: Recipe, available: float | None, stack: str | Stack = "seatrial") -> Recipe:
    """`recipe` as this job would run it, with `accumulate = "auto"` resolved; on another stack without our settings."""
    if stack_for(recipe, stack).name not in OURS:
        return replace(recipe, accumulate="whole", offload=False)
    if job.train.accumulate != "auto":
        return recipe
    return replace(recipe, accumulate=chosen(job.architecture, recipe, available, stack)[0])


def accumulate_options(job: Job, recipe: Recipe, stack: str | Stack = "seatrial") -> Iterator[Recipe]:
    """`recipe` with every value of `accumulate` that the job leaves open, least communication first."""
    first = adapted(job, recipe, None, stack)
    yield first
    if (
        job.train.accumulate == "auto"
        and first.accumulate == "whole"
        and not _no_use(recipe, stack_for(recipe, stack))
    ):
        yield replace(first, accumulate="sharded")


def _no_use(recipe: Recipe, stack: Stack) -> str:
    """Why gradients cannot be sharded, or that would save no memory; else ""."""
    layout = recipe.layout
    if stack.name not in OURS:
        return f"{stack.name} has no such setting"
    if recipe.shard_ranks == 1:
        return "gradients are not sharded: shard is 1"
    if layout.splits_backward:
        return f"the schedule {layout.schedule} requires it"
    return ""
