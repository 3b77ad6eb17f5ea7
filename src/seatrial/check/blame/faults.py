"""Faults that a simulated cluster can have: fifteen kinds, what each does, and whom a check should blame for it.

`share` is what is left of a rate. What a fault does to what can be measured:

    gpu_missing      the GPU is not there; usually Xid 79 in the kernel log
    gpu_slow         its matrix products are slower (throttled); nothing else shows it
    gpu_memory       uncorrectable memory errors, half the time with Xid 48; rates are as ever
    gpu_pcie         copies from the host are slower
    nvlink_down      one link is inactive (1/18 less), or where `share` is under a half all links of the GPU, with Xid 74
                     naming the one that went first
    nvlink_errors    one link counts errors under load, copies of the GPU are slower
    nic_down         the port is down
    nic_slow         the rail of this node is slower; no counter shows it
    cable_errors     the port counts symbol errors, the rail is perhaps a little slower
    node_dead        the node stops to answer, at the start or between two rounds (`after`)
    node_slow        all rails of the node are slower (settings of the host)
    node_collective  only all-reduces are slower: rails and NVLinks by themselves are as ever
    leaf_slow        everything through this leaf switch is slower
    leaf_uplinks     `share` of the leaf's uplinks are left: slow only when more leaves it than they carry
    leaf_down        every port below the leaf is down
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from seatrial.check.blame.nodes import SUSPECT

GPU_KINDS = ("gpu_missing", "gpu_slow", "gpu_memory", "gpu_pcie")
NVLINK_KINDS = ("nvlink_down", "nvlink_errors")
NIC_KINDS = ("nic_down", "nic_slow", "cable_errors")
NODE_KINDS = ("node_dead", "node_slow", "node_collective")
LEAF_KINDS = ("leaf_slow", "leaf_uplinks", "leaf_down")
KINDS = (*GPU_KINDS, *NVLINK_KINDS, *NIC_KINDS, *NODE_KINDS, *LEAF_KINDS)

# What `share` is drawn from. The upper bounds are well below 92 %, under which a rate counts as suspect: nearer to it, noise
# decides, and no check could be right.
SHARES = {
    "gpu_slow": (0.40, 0.86),
    "gpu_pcie": (0.25, 0.55),
    "nvlink_down": (0.0, 1.0),
    "nvlink_errors": (0.60, 1.0),
    "nic_slow": (0.25, 0.86),
    "cable_errors": (0.70, 1.0),
    "node_slow": (0.30, 0.85),
    "node_collective": (0.40, 0.86),
    "leaf_slow": (0.40, 0.85),
    "leaf_uplinks": (0.30, 0.60),
}
_MOST_TRIES = 1000
LATEST = 3  # rounds of pairs after which a node may stop to answer


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
    """The sizes of a cluster. Rail r of block b hangs on leaf (b, r); a block is `nodes_per_leaf` nodes, the last fewer."""

    nodes: int
    gpus: int = 8
    rails: int = 8
    links: int = 18
    nodes_per_leaf: int = 32

    @property
    def blocks(self) -> int:
        """Leaf switches for each rail."""
        return -(-self.nodes // self.nodes_per_leaf)

    def name(self, node: int) -> str:
        """A node's name: "node0007"."""
        return f"node{node:04d}"

    def leaf_name(self, leaf: tuple[int, int]) -> str:
        """A leaf switch's name: "leaf03-rail5"."""
        return f"leaf{leaf[0]:02d}-rail{leaf[1]}"


def culprit(fault: Fault, shape: Shape) -> tuple[object, ...]:
    """Whom a check should blame, as `Blame.culprit`."""
    if fault.leaf is not None:
        return ("leaf", None, None, None, fault.leaf[1], shape.leaf_name(fault.leaf))
    assert fault.node is not None
    node = shape.name(fault.node)
    if fault.kind in GPU_KINDS:
        return ("gpu", node, fault.gpu, None, None, None)
    if fault.kind in NVLINK_KINDS:
        return ("nvlink", node, fault.gpu, fault.link, None, None)
    if fault.kind in NIC_KINDS:
        return ("nic", node, None, None, fault.rail, None)
    return ("node", node, None, None, None, None)


def draw(shape: Shape, count: int, rng: np.random.Generator) -> tuple[Fault, ...]:
    """`count` random faults, each kind as likely, none of which another one hides (`hides`).

    Leaf switches only where a block has four nodes, uplinks only where there are two blocks.
    Raises ValueError where so many find no room.
    """
    kinds = [k for k in KINDS if k not in LEAF_KINDS or _big(shape)]
    if shape.blocks < 2 and "leaf_uplinks" in kinds:
        kinds.remove("leaf_uplinks")  # nothing leaves the only leaf
    faults: list[Fault] = []
    for _ in range(_MOST_TRIES):
        if len(faults) == count:
            return tuple(faults)
        fault = _one(shape, str(rng.choice(kinds)), rng)
        if not any(hides(fault, other, shape) for other in faults):
            faults.append(fault)
    raise ValueError(f"{shape.nodes} nodes have no room for {count} faults that do not hide each other")


def _one(shape: Shape, kind: str, rng: np.random.Generator) -> Fault:
    low, high = SHARES.get(kind, (1.0, 1.0))
    fault = Fault(kind, share=float(rng.uniform(low, high)))
    if kind in LEAF_KINDS:
        return replace(fault, leaf=(int(rng.choice(_big(shape))), int(rng.integers(shape.rails))))
    fault = replace(fault, node=int(rng.integers(shape.nodes)))
    if kind in GPU_KINDS or kind in NVLINK_KINDS:
        fault = replace(fault, gpu=int(rng.integers(shape.gpus)))
    if kind in NVLINK_KINDS:
        fault = replace(fault, link=int(rng.integers(shape.links)))
    if kind in NIC_KINDS:
        fault = replace(fault, rail=int(rng.integers(shape.rails)))
    if kind == "node_dead":
        fault = replace(fault, after=int(rng.integers(LATEST + 1)))
    return fault


def _big(shape: Shape) -> list[int]:
    """Blocks of at least four nodes: below it a leaf switch is not told from the ports."""
    size = shape.nodes_per_leaf
    return [b for b in range(shape.blocks) if min(size, shape.nodes - b * size) >= 4]


def hides(one: Fault, other: Fault, shape: Shape) -> bool:
    """Whether one of the two leaves nothing to be seen of the other, so that no check could name both.

    A node that is wrong as a whole hides what is wrong in it. Two faults of one GPU, port or leaf are one. A slow rail
    behind a leaf that is slower, or one that is down, does not show; nor does a slow all-reduce behind a slower leaf.
    """
    if one.leaf is not None and other.leaf is not None:
        return one.leaf == other.leaf
    if one.leaf is None and other.leaf is None:
        if one.node != other.node:
            return False
        same = (one.gpu is not None and one.gpu == other.gpu) or (
            one.rail is not None and one.rail == other.rail
        )
        return same or one.kind in NODE_KINDS or other.kind in NODE_KINDS
    leaf, inner = (one, other) if one.leaf is not None else (other, one)
    assert leaf.leaf is not None
    assert inner.node is not None
    if inner.node // shape.nodes_per_leaf != leaf.leaf[0]:
        return False
    if inner.kind == "node_collective":
        return True
    if inner.rail != leaf.leaf[1]:
        return False
    return leaf.kind == "leaf_down" or (
        leaf.kind == "leaf_slow" and inner.kind == "nic_slow" and inner.share > leaf.share * SUSPECT * 0.95
    )


def verify(faults: Sequence[Fault], shape: Shape) -> list[str]:
    """What is wrong with faults that a person wrote, in words; empty if nothing is."""
    said = []
    for i, fault in enumerate(faults, 1):
        if fault.kind not in KINDS:
            said.append(f"fault {i}: no such kind {fault.kind!r}; the kinds are {', '.join(KINDS)}")
            continue
        needs = {"leaf"} if fault.kind in LEAF_KINDS else {"node"}
        needs |= {"gpu"} if fault.kind in (*GPU_KINDS, *NVLINK_KINDS) else set()
        needs |= {"link"} if fault.kind in NVLINK_KINDS else set()
        needs |= {"rail"} if fault.kind in NIC_KINDS else set()
        limits = {"node": shape.nodes, "gpu": shape.gpus, "link": shape.links, "rail": shape.rails}
        for name in ("node", "gpu", "link", "rail", "leaf"):
            value = getattr(fault, name)
            if name in needs and value is None:
                said.append(f"fault {i} ({fault.kind}): needs {name!r}")
            elif name not in needs and value is not None:
                said.append(f"fault {i} ({fault.kind}): has no {name!r}")
            elif value is not None and name != "leaf" and not 0 <= value < limits[name]:
                said.append(f"fault {i} ({fault.kind}): {name} {value} is not in 0..{limits[name] - 1}")
        if fault.leaf is not None and not (
            0 <= fault.leaf[0] < shape.blocks and 0 <= fault.leaf[1] < shape.rails
        ):
            said.append(f"fault {i} ({fault.kind}): there is no leaf {list(fault.leaf)}")
        if not 0.0 <= fault.share <= 1.0:
            said.append(f"fault {i} ({fault.kind}): share {fault.share} is not in 0..1")
    return said
