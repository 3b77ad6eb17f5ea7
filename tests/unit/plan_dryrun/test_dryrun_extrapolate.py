"""From few layers and microbatches to many, in integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.job.layout import Layout
from seatrial.plan.cost.dryrun_extrapolate import Axis, Grid, extrapolate, extrapolate_peak, grid

PIPELINED = Layout(pipeline=2, shard=8, tensor=8)


def test_a_large_step_is_extrapolated_from_four_small_ones() -> None:
    at = grid(PIPELINED, 80, 64)
    assert at.points == [(8, 5), (8, 6), (10, 5), (10, 6)]
    assert not at.exact


def test_extrapolation_keeps_remainder_layers_in_the_same_stages() -> None:
    layout = Layout(pipeline=4)
    at = grid(layout, 61, 64)
    assert [layers for layers, _ in at.points] == [17, 17, 21, 21]
    for layers in (17, 21, 61):
        sizes = [len(layout.stage_layers(s, layers)) for s in range(4)]
        assert [size - min(sizes) for size in sizes] == [0, 1, 0, 0]


def test_small_sizes_are_traced_without_extrapolation() -> None:
    assert grid(PIPELINED, 10, 4).points == [(10, 4)]
    assert grid(PIPELINED, 10, 4).exact
    assert grid(PIPELINED, 80, 64, whole=True).points == [(80, 64)]
    assert grid(PIPELINED, 80, 6).points == [(8, 6), (10, 6)]
    assert grid(PIPELINED, 80, 6, dense=3).points == [
        (14, 6),
        (16, 6),
    ]  # stages of 7 layers, 3 of them others


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble"])
def test_several_stages_a_rank_need_multiples_of_the_pipeline(schedule: str) -> None:
    layout = Layout(pipeline=4, stages_per_rank=2, schedule=schedule)
    at = grid(layout, 80, 64)
    assert at.microbatches.traced == (16, 20)
    assert at.microbatches.steps == 12


def test_other_microbatch_count_is_rejected_for_the_schedule() -> None:
    with pytest.raises(AssertionError, match="between two schedules"):
        _ = Axis(19, (8, 12)).steps


small = st.integers(-1000, 1000)


@given(a=small, b=small, c=small, d=small, layers=st.integers(6, 200), microbatches=st.integers(6, 200))
def test_counts_of_the_form_are_extrapolated_exactly(
    a: int, b: int, c: int, d: int, layers: int, microbatches: int
) -> None:
    def count(q: int, m: int) -> int:
        return a + b * q + c * m + d * q * m

    at = grid(Layout(), layers, microbatches)
    traces = [{"count": count(*point)} for point in at.points]
    assert extrapolate(at, traces) == {"count": count(layers, microbatches)}


def test_missing_keys_of_a_trace_are_0() -> None:
    at = Grid(Axis(6, (4, 5)), Axis(3, (3,)), (2, 1))
    assert extrapolate(at, [{}, {"x": 2}]) == {"x": 4}


def test_the_peak_may_be_elsewhere_in_the_large_step() -> None:
    at = Grid(Axis(40, (4, 5)), Axis(3, (3,)), (2, 1))
    traces = [
        {"head": {"activations": 100}, "layer": {"activations": 40, "gradients": 8}},
        {
            "head": {"activations": 100},
            "layer": {"activations": 50, "gradients": 10},
            "only here": {"x": 999},
        },
    ]
    assert extrapolate_peak(at, traces) == ("layer", {"activations": 400, "gradients": 80})
