"""Resolve [cluster] and [parallel] to a Layout: available against requested ranks."""

from __future__ import annotations

from typing import Any, cast

from seatrial.job.finding import RuleViolation
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors, either
from seatrial.job.partial import Partial, UnreadableError
from seatrial.job.schema import ClusterSection, JobFile, ParallelSection


def resolve_layout(job: JobFile) -> tuple[Layout, list[RuleViolation]]:
    """The mesh sizes, with a missing `shard` filled in; a Partial if they are not known or do not fit."""
    try:
        parallel = cast(ParallelSection, job.parallel)
    except UnreadableError:
        return cast(Layout, Partial({})), []
    if job.parallel == "auto":  # nothing that needs a layout can be judged yet
        return cast(Layout, Partial({})), []
    known: dict[str, Any] = {}
    for key in ("pipeline", "replicate", "tensor", "stages_per_rank", "schedule", "context", "expert"):
        try:
            known[key] = getattr(parallel, key)
        except UnreadableError:
            continue
    if "pipeline" in known and "stages_per_rank" in known:
        known["stages"] = known["pipeline"] * known["stages_per_rank"]
    try:
        shard, finding = _shard(job.cluster, parallel)
    except UnreadableError:
        shard, finding = None, None
    if shard is None or len(known) < 8:
        return cast(Layout, Partial(known)), [] if finding is None else [finding]
    del known["stages"]
    return Layout(shard=shard * known["context"], **known), []


def _shard(cluster: ClusterSection, parallel: ParallelSection) -> tuple[int | None, RuleViolation | None]:
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    ranks = nodes * gpus
    have = (
        f"{nodes} {_plural('node', nodes)} x {gpus} {_plural('GPU', gpus)} = {ranks} {_plural('rank', ranks)}"
    )
    sizes = {key: getattr(parallel, key) for key in ("tensor", "pipeline", "context", "replicate")}
    fixed = 1
    for size in sizes.values():
        fixed *= size
    # The caret marks the size to change: the largest one above 1.
    used = sorted((key for key, size in sizes.items() if size > 1), key=lambda k: -sizes[k])
    keys = (*(f"parallel.{key}" for key in used), "parallel.shard", "cluster.nodes", "cluster.gpus_per_node")
    asked = " x ".join(f"{key} {sizes[key]}" for key in sizes if sizes[key] > 1)
    if parallel.shard is None:
        if ranks % fixed == 0:
            return ranks // fixed, None
        name = used[0]
        rest = fixed // sizes[name]
        options = divisors(ranks // rest) if ranks % rest == 0 else []
        hint = f"use {name} = {either(options)}" if options else _nodes_hint(fixed, gpus)
        return None, RuleViolation(keys, f"{asked} = {fixed} does not divide {have}", hint)
    world = fixed * parallel.shard
    if world == ranks:
        return parallel.shard, None
    if parallel.shard > 1 or not asked:
        asked = f"{asked} x shard {parallel.shard}" if asked else f"shard {parallel.shard}"
    if ranks % fixed == 0:
        hint = f"use shard = {ranks // fixed}; without `shard` it takes the remaining ranks"
    else:
        hint = _nodes_hint(world, gpus)
    return None, RuleViolation(("parallel.shard", *keys), f"{asked} = {world} ranks, but {have}", hint)


def _nodes_hint(world: int, gpus: int) -> str:
    if world % gpus == 0:
        return f"use nodes = {world // gpus}"
    return "choose sizes whose product is nodes x gpus_per_node"


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
