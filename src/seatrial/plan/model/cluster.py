"""The planner's view of a cluster: GPUs, what NVLink joins, the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from seatrial.hardware.catalogue import Gpu
from seatrial.hardware.networks import Network
from seatrial.job.numbers import divisors
from seatrial.plan.model.recipe import Recipe


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `network` is None if unknown; then nothing that leaves an NVLink domain can be predicted."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 8
    network: Network | None = None
    domain: int | None = None  # GPUs that NVLink joins, of whole nodes; None: those of a node

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def joined(self) -> int:
        """GPUs of this cluster that NVLink joins."""
        return min(self.domain or self.gpus_per_node, self.gpus)

    @property
    def crosses(self) -> bool:
        """Whether its GPUs are in several NVLink domains."""
        return self.gpus > self.joined


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them in each NVLink domain."""

    size: int
    per_domain: int

    @property
    def domains(self) -> int:
        return -(-self.size // self.per_domain)


def placed(cluster: Cluster, recipe: Recipe) -> Cluster:
    """`cluster` with the part of each domain that a scheduler gives the job: 64 of 72 GPUs for 128 in shard groups of 64.

    Nodes in equal numbers a domain; of these the largest that cuts no tensor or context group, nor a shard group that
    fits into a domain (Slurm: --segment).
    """
    if cluster.domain is None or not cluster.crosses:
        return cluster
    nodes, each = cluster.nodes, cluster.gpus_per_node
    least = -(-cluster.gpus // cluster.domain)
    ways = {nodes // n * each for n in (least, *divisors(nodes, most=nodes)) if least <= n <= nodes}
    inner = recipe.layout.tensor * recipe.context
    shard = inner * recipe.layout.shard

    def preferred(joined: int) -> tuple[bool, bool, int]:
        return joined % inner == 0, shard > joined or joined % shard == 0, joined

    return replace(cluster, domain=max(ways, key=preferred))


def group(cluster: Cluster, *, stride: int, size: int) -> Group:
    """The group of ranks r, r + stride, r + 2 stride, ...; neighbouring ranks fill a domain.

    Where borders of domains cut groups unequally, `per_domain` is the smallest part.
    """
    if not cluster.crosses:  # also where `stride` does not divide the node: ranks 0 and 2 of three
        return Group(size, size)
    return Group(size, max(1, math.gcd(cluster.joined, stride * size) // stride))
