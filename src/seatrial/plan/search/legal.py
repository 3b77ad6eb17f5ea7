"""Check a layout on a cluster against the job file's rules, so that only layouts which our trainer accepts are planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.job import Job
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.schema import ParallelSection
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

_PARALLEL = ParallelSection()
_S = TypeVar("_S", bound=BaseModel)


def refusal(job: Job, cluster: Cluster, recipe: Recipe) -> RuleViolation | None:
    """The first rule that refuses `job` with a recipe's layout and batch on `cluster`, or None.

    The sections are copied without validation: their values already have the right types.
    """
    parallel = _changed(_PARALLEL, recipe.parallel)
    values = {
        "microbatch": recipe.microbatch,
        "global_batch": recipe.global_batch,
        "compile": recipe.compiled,
        "activation_checkpointing": recipe.activation_checkpointing,
        "accumulate": recipe.accumulate,
    }
    train = _changed(job.train, values)
    each = cluster.gpus_per_node
    at = {"nodes": cluster.nodes, "gpus_per_node": each, "nvlink_domain": cluster.domain or each}
    nodes = _changed(job.cluster, at)
    file = _changed(job.file, {"parallel": parallel, "train": train, "cluster": nodes})
    facts = Facts(file, job.architecture, recipe.job_layout)
    return next((finding for rule in LAYOUT_RULES for finding in rule(facts)), None)


def _changed(section: _S, values: Mapping[str, Any]) -> _S:
    """`model_copy` of the fields alone. Copying pydantic's own attributes, which no rule reads, took a tenth of a search."""
    copied = type(section).__new__(type(section))
    object.__setattr__(copied, "__dict__", {**vars(section), **values})
    return copied
