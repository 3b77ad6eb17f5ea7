"""The slow link among connections of a ring or of all pairs: it is named, and where none is, none is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from seatrial.hardware.tcp import Connection
from seatrial.scale.links import slow_link

RATE = 1e9
Found = dict[int, list[Connection]]


def address(node: int) -> str:
    return f"10.0.{node // 256}.{node % 256}"


def traffic(
    pairs: Iterable[tuple[int, int]], slow: set[frozenset[int]], times: float, seed: int, ranks: int = 1
) -> Found:
    """What each rank would record: rates vary by 20 %, those over a slow way are `times` slower."""
    random = np.random.default_rng(seed)
    found: Found = {}
    for a, b in pairs:
        for rank in range(a * ranks, a * ranks + ranks):
            rate = RATE * random.uniform(0.8, 1.2)
            if any(way <= {a, b} for way in slow):
                rate /= times
            size = int(random.uniform(2e8, 4e8))
            found.setdefault(rank, []).append(Connection(address(a), address(b), size, size / rate, 0.001, 0))
    return found


def ring(nodes: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % nodes) for i in range(nodes)]


@pytest.mark.parametrize(
    ("shape", "nodes"), [("ring", 4), ("ring", 16), ("ring", 128), ("all", 4), ("all", 16)]
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_node_with_a_slow_link_is_named(nodes: int, shape: str, ranks: int) -> None:
    pairs = ring(nodes) if shape == "ring" else list(itertools.permutations(range(nodes), 2))
    node_of = {rank: rank // ranks for rank in range(nodes * ranks)}
    for seed in range(20):
        node = seed % nodes
        found = slow_link(traffic(pairs, {frozenset({node})}, 4.0, seed, ranks), node_of)
        assert found is not None
        assert found.nodes == (node,)
        assert found.bytes_per_s < RATE / 3
        assert found.others > 0.7 * RATE
        assert 0.4 * found.busy_s < found.excess_s < found.busy_s
        assert slow_link(traffic(pairs, set(), 1.0, seed, ranks), node_of) is None, "all are well"


def test_a_slow_path_between_two_nodes_is_named() -> None:
    found = slow_link(traffic(ring(6), {frozenset({2, 3})}, 5.0, 1), {r: r for r in range(6)})
    assert found is not None
    assert found.nodes == (2, 3)


def test_no_link_is_named_without_enough_data() -> None:
    two = {0: 0, 1: 1}
    assert slow_link(traffic(ring(2), {frozenset({0, 1})}, 9.0, 1), two) is None, "nothing to compare with"
    assert slow_link({}, {}) is None
    several = {frozenset({1}), frozenset({4})}
    assert slow_link(traffic(ring(8), several, 9.0, 1), {r: r for r in range(8)}) is None, "not one link"


def test_messages_and_strangers_do_not_count() -> None:
    found = traffic(ring(4), {frozenset({2})}, 4.0, 3)
    for own in found.values():
        own.append(Connection(own[0].here, "192.168.0.9", 10**9, 100.0, 0.1, 0))  # a store of data
        own.append(Connection(own[0].here, address(0), 1000, 0.5, 0.1, 0))  # control messages
    named = slow_link(found, {r: r for r in range(4)})
    assert named is not None
    assert named.nodes == (2,)
