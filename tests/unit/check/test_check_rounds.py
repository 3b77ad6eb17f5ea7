"""Pairs and groups: disjoint, complete, spread as they must be."""

from __future__ import annotations

from math import ceil, floor, log2

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seatrial.check.blame.rounds import (
    across,
    blocks_of,
    group_sizes,
    groups,
    neighbours,
    tournament,
    with_good,
)

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def blocks_with(members: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(members)), members)


def check_disjoint(pairs: np.ndarray, nodes: int, most_left: int = 1) -> None:
    flat = pairs.reshape(-1).tolist()
    assert len(set(flat)) == len(flat), "a node is in one pair at most"
    assert set(flat) <= set(range(nodes))
    assert nodes - len(flat) <= most_left


@given(st.integers(0, 40))
def test_in_a_tournament_all_meet_all_once(n: int) -> None:
    met = [frozenset(pair) for k in range(max(1, n - 1 + n % 2)) for pair in tournament(n, k)]
    assert len(set(met)) == len(met) == n * (n - 1) // 2


@given(sizes, st.integers(0, 5))
def test_neighbours_are_of_one_block_but_for_the_odd_ones(members: list[int], turn: int) -> None:
    blocks = blocks_with(members)
    pairs = neighbours(blocks, np.arange(len(blocks)), turn)
    check_disjoint(pairs, len(blocks))
    between = sum(blocks[a] != blocks[b] for a, b in pairs)
    assert between <= sum(m % 2 for m in members) / 2


@given(sizes, st.integers(0, 5))
def test_pairs_across_cross_wherever_that_is_possible(members: list[int], turn: int) -> None:
    blocks = blocks_with(members)
    pairs = across(blocks, np.arange(len(blocks)), turn)
    check_disjoint(pairs, len(blocks))
    same = sum(blocks[a] == blocks[b] for a, b in pairs)
    assert same <= max(members), "only what is too many in the largest block stays within it"


def test_across_spreads_a_block_over_all_others() -> None:
    blocks = blocks_with([32] * 8)
    pairs = across(blocks, np.arange(256))
    for block in range(8):
        others = [
            int(blocks[b if blocks[a] == block else a]) for a, b in pairs if block in (blocks[a], blocks[b])
        ]
        counts = np.bincount(others, minlength=8)
        assert counts[block] == 0
        assert max(counts) <= ceil(32 / 7)


def test_across_takes_other_blocks_each_turn() -> None:
    blocks = blocks_with([4] * 4)
    first, second = ({frozenset(p) for p in across(blocks, np.arange(16), turn).tolist()} for turn in (0, 1))
    assert not first & second


@given(st.integers(2, 40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_suspects_partner_is_good_on_the_suspected_rail(n: int, rails: int, random: object) -> None:
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    suspects = rng.random((n, rails)) < 0.2
    good = ~suspects & (rng.random((n, rails)) < 0.8)
    leaves = rng.integers(0, 3, (n, rails))
    pairs = with_good(suspects, good, leaves, set(), 0)
    flat = pairs.reshape(-1).tolist()
    assert len(set(flat)) == len(flat)
    suspected = suspects.any(axis=1)
    for a, b in pairs:
        assert suspected[a]
        assert suspected[b] or good[b, suspects[a]].all()


def test_new_partner_under_the_same_leaf_is_preferred() -> None:
    suspects, good = np.zeros((6, 1), dtype=bool), np.ones((6, 1), dtype=bool)
    suspects[0], good[0] = True, False
    leaves = np.array([[0], [1], [1], [0], [0], [1]])
    first = int(with_good(suspects, good, leaves, set(), 0)[0, 1])
    assert leaves[first, 0] == 0
    second = int(with_good(suspects, good, leaves, {(0, first)}, 0)[0, 1])
    assert leaves[second, 0] == 0
    assert second != first


@given(st.integers(0, 5000))
def test_groups_hold_every_node_once_and_double(n: int) -> None:
    order = np.arange(n)
    for size in group_sizes(n):
        parts = groups(order, size)
        assert np.concatenate(parts).tolist() == order.tolist()
        assert all(size <= len(p) < 2 * size for p in parts)
    if n > 2:
        assert group_sizes(n)[-1] == n
        assert len(group_sizes(n)) == max(1, floor(log2(n)) - 1)


def test_blocks_are_nodes_below_the_same_leaves() -> None:
    leaves = np.array([[0, 4], [0, 4], [1, 5], [0, 5]])
    blocks = blocks_of(leaves)
    assert blocks[0] == blocks[1]
    assert len(set(blocks.tolist())) == 3
