"""The layouts with which a job can continue on fewer nodes: whole data-parallel replicas removed, nothing else changed.

The global batch stays, so every remaining replica works on more microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seatrial.job.finding import Facts
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.rules_layout import LAYOUT_RULES


@dataclass(frozen=True)
class Shape:
    """A layout, and how many nodes it takes. The last node may have fewer ranks than the others."""

    slots: int
    layout: Layout


def shapes(job: Job) -> list[Shape]:
    """The job's own layout, then those that fit on fewer nodes, largest first.

    `replicate` shrinks first, then `shard`. Every layout obeys the rules of `job.rules_layout`. One that needs as
    many nodes as a larger one is left out: losing a node never makes it necessary.
    """
    own = job.layout
    smaller = [replace(own, replicate=n) for n in range(own.replicate - 1, 0, -1)]
    shards = range(own.shard - own.context, 0, -own.context)
    smaller += [replace(own, replicate=1, shard=n) for n in shards]
    found = [Shape(slots_of(job, own), own)]
    for layout in smaller:
        slots = slots_of(job, layout)
        if slots < found[-1].slots and _holds(at_shape(job, layout)):
            found.append(Shape(slots, layout))
    return found


def slots_of(job: Job, layout: Layout) -> int:
    """Nodes that `layout` takes."""
    return -(-layout.world_size // job.cluster.gpus_per_node)


def at_shape(job: Job, layout: Layout) -> Job:
    """The same job under a layout that differs in its data-parallel sizes alone; it has the same identity."""
    own = job.layout
    assert replace(layout, replicate=own.replicate, shard=own.shard) == own, f"{layout} is no shape of {own}"
    cluster = job.cluster.model_copy(update={"nodes": slots_of(job, layout)})
    parallel = job.parallel.model_copy(update={"replicate": layout.replicate, "shard": layout.sample_shards})
    file = job.file.model_copy(update={"cluster": cluster, "parallel": parallel})
    return replace(job, file=file, layout=layout)


def _holds(job: Job) -> bool:
    facts = Facts(job.file, job.architecture, job.layout)
    return not any(finding for rule in LAYOUT_RULES for finding in rule(facts))
