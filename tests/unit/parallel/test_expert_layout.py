"""Which experts each rank of an expert-parallel layout holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.checkpoint.memory import layout_key
from seatrial.job.layout import Layout


@pytest.mark.parametrize(("shard", "expert"), [(4, 1), (4, 2), (4, 4), (12, 3)])
def test_each_part_of_the_experts_is_on_one_rank(shard: int, expert: int) -> None:
    layout = Layout(shard=shard, expert=expert)
    parts = [layout.expert_shard(rank) for rank in range(shard)]
    assert sorted(parts) == list(range(shard))
    # The ranks of a group have different parts of size / expert; together with the same ranks of other groups all of each.
    size = shard // expert
    for rank, part in enumerate(parts):
        assert part // size == rank % expert
        assert part % size == rank // expert


def test_without_groups_or_with_one_a_rank_has_its_own_part() -> None:
    for expert in (1, 4):
        layout = Layout(shard=4, expert=expert)
        assert [layout.expert_shard(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_layout_with_expert() -> None:
    layout = Layout(pipeline=2, replicate=2, shard=4, tensor=2, expert=2)
    assert (layout.world_size, layout.data_parallel) == (32, 8)
    assert str(layout) == "tensor 2 x pipeline 2 x shard 4 (expert 2) x replicate 2, 1f1b"
    assert Layout.from_dict(layout.as_dict()) == layout
    older = {key: value for key, value in layout.as_dict().items() if key != "expert"}
    assert Layout.from_dict(older) == replace(layout, expert=1)


def test_a_copy_in_memory_is_of_one_division_of_the_experts() -> None:
    plain, divided = Layout(shard=4), Layout(shard=4, expert=2)
    assert layout_key(plain.as_dict()) != layout_key(divided.as_dict())
    older = {key: value for key, value in plain.as_dict().items() if key != "expert"}
    assert layout_key(older) == layout_key(plain.as_dict())
