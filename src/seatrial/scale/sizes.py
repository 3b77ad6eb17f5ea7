"""The copies of a job that are measured: one per number of nodes, otherwise as similar as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from seatrial.base.errors import Diagnostic, InputError
from seatrial.job import Job
from seatrial.job.changed import Change, changed_job
from seatrial.job.finding import RuleViolation
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.scaling import Mode, resized

_HERE = ("parallel.tensor", "parallel.pipeline", "cluster.gpus_per_node")
_BATCH = ("train.global_batch", "train.microbatch")


@dataclass(frozen=True)
class Size:
    """The job at one number of nodes."""

    job: Job
    changes: tuple[Change, ...]

    @property
    def nodes(self) -> int:
        return self.job.cluster.nodes

    @property
    def gpus(self) -> int:
        """Ranks: GPUs, or processes of a virtual cluster."""
        return self.job.layout.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.job.train.global_batch * self.job.train.sequence_length


def sizes_of(job: Job, nodes: Sequence[int], mode: Mode, *, steps: int, stores: Sequence[str]) -> list[Size]:
    """`job` at each number of `nodes`, for `steps` steps on the prepared `stores`.

    Tensor and pipeline sizes stay, data parallel takes the rest (`plan.search.scaling.resized`). Raises InputError with
    every size that the layout or the rules of the job file do not allow, each at its key in the job file.
    """
    shape, own = hardware_of(job).shape, Recipe.of(job)
    problems: list[Diagnostic] = []
    sizes = []
    for n in sorted(set(nodes)):
        at = replace(shape, nodes=n)
        recipe, why = resized(own, at.gpus, mode=mode)
        found = None if recipe is None else refusal(job.without_ramp(), at, recipe)
        if recipe is None:
            keys = _BATCH if "batch" in (why or "") else _HERE
            found = RuleViolation(keys, why or "", "remove this size from --nodes, or change the layout")
        if found is not None or recipe is None:
            assert found is not None
            problems.append(
                job.located(RuleViolation(found.keys, f"with {in_words(n)}: {found.message}", found.hint))
            )
            continue
        try:
            copy = changed_job(job, _changed_keys(job, recipe, n, steps, stores))
        except InputError as error:
            problems += error.diagnostics
        else:
            sizes.append(Size(copy.job, copy.changes))
    if problems:
        raise InputError(problems)
    return sizes


_NO_VALIDATION = "only training steps are measured"


def in_words(nodes: int) -> str:
    """A number of nodes: 1 node, 2 nodes."""
    return f"{nodes} node{'s' * (nodes != 1)}"


def _changed_keys(
    job: Job, recipe: Recipe, nodes: int, steps: int, stores: Sequence[str]
) -> dict[str, tuple[Any, str]]:
    """key -> (value, why)."""
    grown = "data parallel takes all ranks of this size"
    return {
        "name": (f"{nodes}-nodes", "the live run is not touched"),
        "data.train": (
            list(stores) if isinstance(job.data.train, list) else stores[0],
            "prepared once for all sizes",
        ),
        "data.validation": (None, _NO_VALIDATION),
        "train.validate_every_steps": (None, _NO_VALIDATION),
        "train.validate_samples": (None, _NO_VALIDATION),
        "cluster.nodes": (nodes, "the size"),
        "cluster.port": (None, "leaves the live run's port free"),
        "cluster.spares": (0, "spares would not train"),
        "parallel.replicate": (recipe.layout.replicate, grown),
        "parallel.shard": (recipe.layout.shard, grown),
        "train.global_batch": (recipe.global_batch, "as many microbatches a replica as in the job"),
        "train.steps": (steps, "short"),
        "train.batch_ramp": ([], "the steps after the ramp are measured"),
        "train.sample_tokens": (0, "no sample text at the end"),
        "optimizer.warmup_steps": (min(job.optimizer.warmup_steps, steps), "not longer than the copy"),
        "optimizer.decay": (
            "constant",
            "so that the learning rate of a step does not depend on their number",
        ),
        "optimizer.decay_steps": (None, "it applies to another decay"),
        "checkpoint.every_steps": (steps, "one at the end, after the measured steps; it is deleted"),
        "checkpoint.keep_every_steps": (0, "it is deleted"),
        "checkpoint.folder": (None, "the live run's storage is not touched"),
        "checkpoint.fallback": (None, "the live run's storage is not touched"),
        "resilience.max_restarts": (0, "a run that recovers measures the recovery"),
        "resilience.shrink": (False, "it would be another size"),
        "resilience.join_wait_s": (job.resilience.join_wait_s or 600.0, "a node that is not there ends it"),
        "resilience.allow_gpu_reset": (False, "a measurement resets no GPU"),
        "resilience.allow_node_drain": (False, "a measurement drains no node"),
        "watch.metrics_port": (None, "leaves the live run's ports free"),
    }
