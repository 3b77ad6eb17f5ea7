"""Schedules the rounds: disjoint pairs and groups of nodes. Pure.

In one round every node is in at most one pair, and all pairs measure at once, each rail separately. Nodes below the
same leaf switches form one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seatrial.check.blame.nodes import Bools, Ints


@dataclass(frozen=True)
class Round:
    """One round of pairs. `loaded`: all nodes send at once, so that traffic leaving a leaf needs all its uplinks."""

    number: int
    purpose: str
    pairs: Ints  # (P, 2), positions of nodes
    rails: Bools  # (P, R), the rails to measure
    collective: Bools  # (P,), whether to run the all-reduce
    loaded: bool


@dataclass(frozen=True)
class GroupRound:
    """One round of all-reduces: disjoint groups of `size` nodes (the last may be larger), all at once."""

    number: int
    size: int
    groups: tuple[Ints, ...]


def blocks_of(leaves: Ints) -> Ints:
    """The block of each node, (N,), from the leaf of each of its ports, (N, R)."""
    _, blocks = np.unique(leaves, axis=0, return_inverse=True)
    return np.asarray(blocks, dtype=np.int64).reshape(-1)


def tournament(n: int, k: int) -> list[tuple[int, int]]:
    """Round `k` of a round-robin tournament of `n` (circle method); one sits out if `n` is odd."""
    m = n + n % 2
    if m < 2:
        return []
    k %= m - 1
    pairs = [(m - 1, k)] + [((k + i) % (m - 1), (k - i) % (m - 1)) for i in range(1, m // 2)]
    return [(a, b) for a, b in pairs if a < n and b < n]


def neighbours(blocks: Ints, nodes: Ints, variant: int = 0) -> Ints:
    """Pairs within blocks; unpaired nodes of all blocks with each other. Another `variant` gives other partners."""
    pairs: list[tuple[int, int]] = []
    odd: list[int] = []
    for block in np.unique(blocks[nodes]):
        members = nodes[blocks[nodes] == block]
        met = tournament(len(members), variant)
        pairs += [(int(members[a]), int(members[b])) for a, b in met]
        odd += _rest(members, met)
    pairs += [(odd[a], odd[b]) for a, b in tournament(len(odd), variant)]
    return _array(pairs)


def across(blocks: Ints, nodes: Ints, variant: int = 0) -> Ints:
    """Pairs between blocks, the nodes of a block spread over as many other blocks as possible.

    So all flows of a block with bad uplinks are slow, and of another block only those that lead there. Another `variant`
    gives other blocks. Nodes that are left (one block is larger than all others) are paired within their block.
    """
    members = [nodes[blocks[nodes] == block] for block in np.unique(blocks[nodes])]
    pairs: list[tuple[int, int]] = []
    left: list[int] = []
    for row in range(max((len(m) for m in members), default=0)):
        here = [int(m[row]) for m in members if row < len(m)]
        met = tournament(len(here), row + variant)
        pairs += [(here[a], here[b]) for a, b in met]
        left += _rest(np.array(here), met)
    # The rows' unpaired nodes: by block, each with the one half the list away, of another block if there is one.
    left.sort(key=lambda node: (int(blocks[node]), node))
    half = len(left) // 2
    pairs += [(left[i], left[i + half]) for i in range(half)]
    return _array(pairs)


def _rest(members: Ints, met: list[tuple[int, int]]) -> list[int]:
    taken = {i for pair in met for i in pair}
    return [int(m) for i, m in enumerate(members) if i not in taken]


def _array(pairs: Sequence[tuple[int, int]]) -> Ints:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def with_good(suspects: Bools, good: Bools, leaves: Ints, met: set[tuple[int, int]], variant: int) -> Ints:
    """Pair each node that has suspect ports with a node whose ports are good on all these rails.

    `suspects` and `good` are (N, C): the rails, and anything else a node can be suspected of. Partners below the same
    leaf are preferred (nothing else is then on the path), and ones that were not the partner before (`met`). Suspects
    without a good node left are paired with each other, with other partners each `variant`.
    """
    suspected = np.flatnonzero(suspects.any(axis=1))
    free: Bools = np.logical_not(suspects.any(axis=1))
    rails = leaves.shape[1]
    pairs: list[tuple[int, int]] = []
    left: list[int] = []
    # Nodes with the most suspect ports first: partners for them are hardest to find.
    for node in sorted(suspected, key=lambda n: -int(suspects[n].sum())):
        wanted = suspects[node]
        can: Bools = np.logical_and(free, good[:, wanted].all(axis=1))
        can[node] = False
        if not can.any():
            left.append(int(node))
            continue
        near = (
            (leaves[:, wanted[:rails]] == leaves[node, wanted[:rails]]).mean(axis=1)
            if wanted[:rails].any()
            else 0
        )
        known = np.zeros(len(free))
        known[[b for a, b in met if a == node] + [a for a, b in met if b == node]] = 1
        order = (np.arange(len(free)) - node - variant) % len(free) / len(free)
        score = np.where(can, 4 * near - 2 * known - order, -np.inf)
        partner = int(np.argmax(score))
        free[partner] = False
        pairs.append((int(node), partner))
    pairs += [(left[a], left[b]) for a, b in tournament(len(left), variant)]
    return _array(pairs)


def groups(order: Ints, size: int) -> tuple[Ints, ...]:
    """`order` in groups of `size`; the remainder joins the last one. At least one group if there are two nodes."""
    if len(order) < 2:
        return ()
    count = max(1, len(order) // size)
    return tuple(order[i * size : (i + 1) * size if i < count - 1 else len(order)] for i in range(count))


def group_sizes(nodes: int) -> list[int]:
    """4, 8, 16, ... and all of them: log2(nodes) rounds without the first, which the pairs cover."""
    sizes = []
    size = 4
    while 2 * size <= nodes:  # a larger size has one group, which is all nodes
        sizes.append(size)
        size *= 2
    return [*sizes, nodes] if nodes > 2 else []
