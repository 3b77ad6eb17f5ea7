"""Which node has which ranks, whatever the layout and however few the last node has."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.control.machine.world import World
from seatrial.job.layout import Layout
from seatrial.job.shapes import Shape


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Shape], int]:
    per_node = draw(st.integers(1, 8))
    shapes = []
    for replicate in range(draw(st.integers(1, 4)), 0, -1):
        layout = Layout(replicate=replicate, tensor=draw(st.integers(1, 6)))
        shapes.append(Shape(-(-layout.world_size // per_node), layout))
    index = draw(st.integers(0, len(shapes) - 1))
    nodes = draw(st.permutations(range(shapes[index].slots + draw(st.integers(0, 3)))))
    slots = dict(zip(range(shapes[index].slots), nodes, strict=False))
    return World.make(7, slots, shapes, index, per_node), shapes, per_node


@pytest.mark.cluster  # slow
@given(worlds())
def test_each_rank_has_one_node_and_node_ranks_are_contiguous(
    made: tuple[World, list[Shape], int],
) -> None:
    world, _, per_node = made
    size = world.shape.layout.world_size
    assert [rank for node in world.nodes for rank in world.ranks[node]] == list(range(size))
    assert all(1 <= len(ranks) <= per_node for ranks in world.ranks.values())
    assert all(len(world.ranks[node]) == per_node for node in world.nodes[:-1])
    assert all(rank in world.ranks[world.node_of(rank)] for rank in range(size))  # type: ignore[index]
    assert world.node_of(size) is None


@given(worlds())
def test_buddies_form_a_ring(made: tuple[World, list[Shape], int]) -> None:
    world, _, _ = made
    for slot, node in world.slots.items():
        buddy = world.neighbour(slot, 1)
        if len(world.slots) == 1:
            assert buddy is None
        else:
            assert buddy not in (None, node)
            (place,) = [s for s, n in world.slots.items() if n == buddy]
            assert world.neighbour(place, -1) == node, "whom it guards is whose buddy it is"


@given(worlds())
def test_the_next_coordinator_reads_the_same_world(made: tuple[World, list[Shape], int]) -> None:
    world, shapes, per_node = made
    assert World.from_dict(json.loads(json.dumps(world.to_dict())), shapes, per_node) == world
