"""The planner's view of a cluster: GPUs, NVLink domains, the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from seatrial.hardware.catalogue import Gpu
from seatrial.hardware.networks import Network
from seatrial.job.numbers import divisors
from seatrial.plan.model.recipe import Recipe

# GPU to host memory while all eight copy; `seatrial check` has the lower limits of a single one (23 on A100, 48 on H100).
HOST_GB_S = 20.0
HOST_SOURCE = "assumption: below the 23 GB/s that a single A100 reaches"


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `network` is None if unknown; then communication between NVLink domains cannot be predicted."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 8
    network: Network | None = None
    domain: int | None = None  # GPUs of an NVLink domain, in whole nodes; None: a node is one

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def domain_gpus(self) -> int:
        """GPUs of this cluster in one NVLink domain."""
        return min(self.domain or self.gpus_per_node, self.gpus)

    @property
    def several_domains(self) -> bool:
        """Whether the GPUs are in several NVLink domains."""
        return self.gpus > self.domain_gpus


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them in each NVLink domain."""

    size: int
    per_domain: int

    @property
    def domains(self) -> int:
        return -(-self.size // self.per_domain)


def placed(cluster: Cluster, recipe: Recipe) -> Cluster:
    """`cluster` with the GPUs of each domain that a scheduler allocates: 64 of 72 for 128 GPUs in shard groups of 64.

    Every domain gives equally many nodes: the most that split no tensor or context group, nor a shard group that fits
    into a domain (Slurm: --segment).
    """
    if cluster.domain is None or not cluster.several_domains:
        return cluster
    nodes, each = cluster.nodes, cluster.gpus_per_node
    least = -(-cluster.gpus // cluster.domain)
    sizes = {nodes // n * each for n in (least, *divisors(nodes, most=nodes)) if least <= n <= nodes}
    inner = recipe.layout.tensor * recipe.context
    shard = inner * recipe.layout.shard

    def preferred(joined: int) -> tuple[bool, bool, int]:
        return joined % inner == 0, shard > joined or joined % shard == 0, joined

    return replace(cluster, domain=max(sizes, key=preferred))


def group(cluster: Cluster, *, stride: int, size: int) -> Group:
    """The group of ranks r, r + stride, r + 2 stride, ...; neighbouring ranks fill a domain.

    Where domain boundaries split groups unequally, `per_domain` is the smallest part.
    """
    if not cluster.several_domains:  # also where `stride` does not divide the node: ranks 0 and 2 of three
        return Group(size, size)
    return Group(size, max(1, math.gcd(cluster.domain_gpus, stride * size) // stride))
