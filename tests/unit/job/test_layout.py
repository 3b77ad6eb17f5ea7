from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seatrial.job.layout import Layout

sizes = st.integers(1, 4)
layouts = st.builds(
    Layout, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes, stages_per_rank=st.integers(1, 3)
)


@given(layouts)
def test_every_rank_has_a_place_of_its_own(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))


def test_a_tensor_group_is_neighbouring_ranks() -> None:
    layout = Layout(pipeline=2, shard=8, tensor=8)
    first = [layout.coordinates(rank) for rank in range(8)]
    assert [place.tensor for place in first] == list(range(8))
    assert {(place.pipeline, place.shard) for place in first} == {(0, 0)}
    assert layout.coordinates(64).pipeline == 1


@given(layouts, st.integers(0, 100))
def test_stages_share_all_layers_evenly(layout: Layout, extra: int) -> None:
    layers = layout.stages + extra
    parts = [layout.stage_layers(stage, layers) for stage in range(layout.stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    counts = [len(part) for part in parts]
    for rank in range(layout.pipeline):
        assert layout.rank_layers(rank, layers) == tuple(counts[s] for s in layout.stage_indices(rank))
    assert max(counts) - min(counts) <= 1
    if layout.stages > 2:
        # The ends carry the embedding and the head: spare layers go between them first.
        assert counts[0] <= max(counts[1:-1])
        assert counts[-1] <= counts[0]


@given(layouts)
def test_every_stage_is_on_one_rank(layout: Layout) -> None:
    held = [stage for rank in range(layout.pipeline) for stage in layout.stage_indices(rank)]
    assert sorted(held) == list(range(layout.stages))
