"""The planner's view of a cluster: GPUs, the links inside a node, the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.hardware.catalogue import Gpu
from seatrial.hardware.networks import Network


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `network` is None if unknown; then nothing that crosses nodes can be predicted."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 8
    network: Network | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them in each node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def group(cluster: Cluster, *, stride: int, size: int) -> Group:
    """The group of ranks r, r + stride, r + 2 stride, ...; neighbouring ranks fill a node."""
    if cluster.nodes == 1:  # also where `stride` does not divide the node: ranks 0 and 2 of three
        return Group(size, size)
    return Group(size, min(size, max(1, cluster.gpus_per_node // stride)))
