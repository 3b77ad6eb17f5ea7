"""Whether the rules of the job file allow a layout on a cluster: what our trainer would refuse is never planned."""

from __future__ import annotations

from typing import Any

from seatrial.job.finding import Facts, Finding
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.schema import ParallelSection
from seatrial.plan.cluster import Cluster


def refusal(
    job: Job,
    cluster: Cluster,
    layout: Layout,
    *,
    microbatch: int,
    reshard: bool,
    async_tensor: bool = False,
    global_batch: int | None = None,
) -> Finding | None:
    """The first rule that refuses `job` with this layout and batch (its own if None) on `cluster`; None if all allow it.

    The sections are copied unchecked: their values are of the right kind.
    """
    sizes: dict[str, Any] = {k: v for k, v in layout.as_dict().items() if k != "world_size"}
    parallel = ParallelSection.model_construct(
        **{
            "context": 1,
            "expert": 1,
            "reshard_after_forward": reshard,
            "async_tensor": async_tensor,
            **sizes,
        }
    )
    batch = job.train.global_batch if global_batch is None else global_batch
    train = job.train.model_copy(update={"microbatch": microbatch, "global_batch": batch})
    nodes = job.cluster.model_copy(update={"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node})
    file = job.file.model_copy(update={"parallel": parallel, "train": train, "cluster": nodes})
    facts = Facts(file, job.architecture, layout)
    for rule in LAYOUT_RULES:
        for finding in rule(facts):
            return finding
    return None
