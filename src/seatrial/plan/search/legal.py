"""Check a layout on a cluster against the job file's rules, so that only layouts which our trainer accepts are planned."""

from __future__ import annotations

from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.job import Job
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.schema import ParallelSection
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe


def refusal(job: Job, cluster: Cluster, recipe: Recipe) -> RuleViolation | None:
    """The first rule that refuses `job` with a recipe's layout and batch on `cluster`, or None.

    The sections are copied without validation: their values already have the right types.
    """
    parallel = ParallelSection.model_construct(expert=1, **recipe.parallel)
    values = {
        "microbatch": recipe.microbatch,
        "global_batch": recipe.global_batch,
        "compile": recipe.compiled,
    }
    train = job.train.model_copy(update={**values, "accumulate": recipe.accumulate})
    each = cluster.gpus_per_node
    at = {"nodes": cluster.nodes, "gpus_per_node": each, "nvlink_domain": cluster.domain or each}
    nodes = job.cluster.model_copy(update=at)
    file = job.file.model_copy(update={"parallel": parallel, "train": train, "cluster": nodes})
    facts = Facts(file, job.architecture, recipe.layout)
    return next((finding for rule in LAYOUT_RULES for finding in rule(facts)), None)
