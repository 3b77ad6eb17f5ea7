"""Random faults for a simulated cluster, and whom a check should blame for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seatrial.check.blame.faults import (
    GPU_KINDS,
    KINDS,
    LEAF_KINDS,
    NIC_KINDS,
    NODE_KINDS,
    NVLINK_KINDS,
    Fault,
    Shape,
)
from seatrial.check.blame.nodes import SUSPECT

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
