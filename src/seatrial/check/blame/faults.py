"""Faults that a simulated cluster can have: fifteen kinds and their effects.

`share` is the remaining share of a rate. The effect of each fault on the measurements:

    gpu_missing      the GPU is missing; usually Xid 79 in the kernel log
    gpu_slow         its matrix products are slower (throttled); nothing else shows it
    gpu_memory       uncorrectable memory errors, half the time with Xid 48; rates are unchanged
    gpu_pcie         copies from the host are slower
    nvlink_down      one link is inactive (1/18 less), or if `share` is below 0.5 all links of the GPU, with Xid 74
                     naming the one that failed first
    nvlink_errors    one link counts errors under load, copies of the GPU are slower
    nic_down         the port is down
    nic_slow         the rail of this node is slower; no counter shows it
    cable_errors     the port counts symbol errors, the rail is perhaps a little slower
    node_dead        the node stops answering, at the start or between two rounds (`after`)
    node_slow        all rails of the node are slower (settings of the host)
    node_collective  only all-reduces are slower: rails and NVLinks by themselves are unchanged
    leaf_slow        everything through this leaf switch is slower
    leaf_uplinks     `share` of the leaf's uplinks are left: slow only when more traffic leaves it than they carry
    leaf_down        every port below the leaf is down
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GPU_KINDS = ("gpu_missing", "gpu_slow", "gpu_memory", "gpu_pcie")
NVLINK_KINDS = ("nvlink_down", "nvlink_errors")
NIC_KINDS = ("nic_down", "nic_slow", "cable_errors")
NODE_KINDS = ("node_dead", "node_slow", "node_collective")
LEAF_KINDS = ("leaf_slow", "leaf_uplinks", "leaf_down")
KINDS = (*GPU_KINDS, *NVLINK_KINDS, *NIC_KINDS, *NODE_KINDS, *LEAF_KINDS)


@dataclass(frozen=True)
class Fault:
    """One fault. `leaf` is (block, rail); which fields are set depends on the kind."""

    kind: str
    node: int | None = None
    gpu: int | None = None
    link: int | None = None
    rail: int | None = None
    leaf: tuple[int, int] | None = None
    share: float = 1.0
    after: int = 0


@dataclass(frozen=True)
class Shape:
    """The size of a cluster. Rail r of block b is on leaf (b, r); `nodes_per_leaf` nodes a block, the last fewer."""

    nodes: int
    gpus: int = 8
    rails: int = 8
    links: int = 18
    nodes_per_leaf: int = 32

    @property
    def blocks(self) -> int:
        """Number of leaf switches per rail."""
        return -(-self.nodes // self.nodes_per_leaf)

    def name(self, node: int) -> str:
        """A node's name: "node0007"."""
        return f"node{node:04d}"

    def leaf_name(self, leaf: tuple[int, int]) -> str:
        """A leaf switch's name: "leaf03-rail5"."""
        return f"leaf{leaf[0]:02d}-rail{leaf[1]}"


def verify(faults: Sequence[Fault], shape: Shape) -> list[str]:
    """The problems of hand-written faults, as text; empty if there are none."""
    entries = []
    for i, fault in enumerate(faults, 1):
        if fault.kind not in KINDS:
            entries.append(f"fault {i}: no such kind {fault.kind!r}; the kinds are {', '.join(KINDS)}")
            continue
        needs = {"leaf"} if fault.kind in LEAF_KINDS else {"node"}
        needs |= {"gpu"} if fault.kind in (*GPU_KINDS, *NVLINK_KINDS) else set()
        needs |= {"link"} if fault.kind in NVLINK_KINDS else set()
        needs |= {"rail"} if fault.kind in NIC_KINDS else set()
        limits = {"node": shape.nodes, "gpu": shape.gpus, "link": shape.links, "rail": shape.rails}
        for name in ("node", "gpu", "link", "rail", "leaf"):
            value = getattr(fault, name)
            if name in needs and value is None:
                entries.append(f"fault {i} ({fault.kind}): needs {name!r}")
            elif name not in needs and value is not None:
                entries.append(f"fault {i} ({fault.kind}): has no {name!r}")
            elif value is not None and name != "leaf" and not 0 <= value < limits[name]:
                entries.append(f"fault {i} ({fault.kind}): {name} {value} is not in 0..{limits[name] - 1}")
        if fault.leaf is not None and not (
            0 <= fault.leaf[0] < shape.blocks and 0 <= fault.leaf[1] < shape.rails
        ):
            entries.append(f"fault {i} ({fault.kind}): there is no leaf {list(fault.leaf)}")
        if not 0.0 <= fault.share <= 1.0:
            entries.append(f"fault {i} ({fault.kind}): share {fault.share} is not in 0..1")
    return entries
