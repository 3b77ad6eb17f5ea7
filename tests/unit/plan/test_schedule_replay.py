"""Schedules: every pass once in a valid order, the closed form against the replay, activations in flight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from seatrial.job.schedules import Pass, PipelineSchedule, Times, replay, schedule_named

CASES = [
    (schedule, ranks, per_rank, groups * ranks)
    for schedule, many in (
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("interleaved-1f1b", (2, 3)),
        ("zero-bubble", (2, 3)),
    )
    for per_rank in many
    for ranks in (2, 3, 4, 8)
    for groups in (1, 2, 5)
]


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "m"), CASES)
def test_every_pass_runs_once(schedule: str, ranks: int, per_rank: int, m: int) -> None:
    for rank in range(ranks):
        passes = schedule_named(schedule).order(ranks, per_rank, m, rank)
        forward = [p for p in passes if p.kind == "F"]
        assert len({(p.stage, p.microbatch) for p in forward}) == len(forward) == m * per_rank
        for kind in ("I", "W") if schedule == "zero-bubble" else ("B",):
            mine = [(p.stage, p.microbatch) for p in passes if p.kind == kind]
            assert sorted(mine) == sorted((p.stage, p.microbatch) for p in forward)
        assert {p.stage % ranks for p in passes} == {rank}


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "m"), CASES)
def test_closed_form_equals_the_replay_of_equal_stages(
    schedule: str, ranks: int, per_rank: int, m: int
) -> None:
    times = [Times(1.0, 2.0)] * (ranks * per_rank)
    played, said = (
        replay(schedule_named(schedule), ranks, per_rank, m, times),
        schedule_named(schedule).span(ranks, per_rank, m, times),
    )
    assert said == pytest.approx(played, rel=0.005 if schedule == "zero-bubble" else 1e-9)


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "m"), CASES)
def test_activations_held(schedule: str, ranks: int, per_rank: int, m: int) -> None:
    last = "W" if schedule == "zero-bubble" else "B"
    for rank in range(ranks):
        held = most = 0
        for kind, _, _ in schedule_named(schedule).order(ranks, per_rank, m, rank):
            held += (kind == "F") - (kind == last)
            most = max(most, held)
        said = schedule_named(schedule).in_flight(ranks, per_rank, m, rank)
        assert said == most if schedule != "zero-bubble" else most <= said <= most + 1


@given(
    ranks=st.integers(2, 8),
    groups=st.integers(1, 6),
    per_rank=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_closed_form_is_close_if_stages_differ(
    ranks: int, groups: int, per_rank: int, data: st.DataObject
) -> None:
    schedule = "1f1b" if per_rank == 1 else "interleaved-1f1b"
    times = [
        Times(data.draw(st.floats(0.9, 1.2)), data.draw(st.floats(1.8, 2.4))) for _ in range(ranks * per_rank)
    ]
    m = groups * ranks
    played, said = (
        replay(schedule_named(schedule), ranks, per_rank, m, times),
        schedule_named(schedule).span(ranks, per_rank, m, times),
    )
    assert said == pytest.approx(
        played, rel=0.15
    )  # a third more in some stages; at worst 12 % of 3,000 drawn
    assert played >= m * max(
        sum(sum(times[s][:2]) for s in range(r, len(times), ranks)) for r in range(ranks)
    ) * (1 - 1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_order_is_torchs(ranks: int, per_rank: int, groups: int) -> None:
    names = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    kinds = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
    m = groups * ranks
    for schedule, kind in kinds.items():
        torchs = object.__new__(kind)  # its constructor wants stages and process groups
        torchs.pp_group_size, torchs.n_local_stages, torchs._n_microbatches = ranks, per_rank, m
        torchs.number_of_rounds, torchs.microbatches_per_round = groups, ranks
        for rank in range(ranks):
            theirs = [
                (names[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in torchs._calculate_single_rank_operations(rank)
                if a is not None
            ]
            assert [tuple(p) for p in schedule_named(schedule).order(ranks, per_rank, m, rank)] == theirs


def test_the_textbook_bubble() -> None:
    """(p - 1) / m of the work for 1F1B, a v-th of that interleaved (arXiv:2104.04473, section 2.2)."""
    p, m = 4, 16
    work = m * 3.0
    assert schedule_named("1f1b").span(p, 1, m, [Times(1.0, 2.0)] * p) == pytest.approx(
        work * (1 + (p - 1) / m)
    )
    halves = [Times(0.5, 1.0)] * (2 * p)
    assert schedule_named("interleaved-1f1b").span(p, 2, m, halves) == pytest.approx(
        work * (1 + (p - 1) / m / 2)
    )


class InOrder(PipelineSchedule):
    """A schedule of another package, which gives nothing but its order: here that of one that is built in."""

    def order(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
        return schedule_named(self.name).order(ranks, per_rank, microbatches, rank)


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "m"), CASES)
def test_a_schedule_derived_from_its_order_alone(schedule: str, ranks: int, per_rank: int, m: int) -> None:
    own = schedule_named(schedule)
    derived = InOrder(schedule, "", own.several_stages, own.split_backward)
    times = [Times(1.0, 2.0)] * (ranks * per_rank)
    assert derived.span(ranks, per_rank, m, times) == pytest.approx(own.span(ranks, per_rank, m, times))
    for rank in range(ranks):
        at = (ranks, per_rank, m, rank)
        assert own.in_flight(*at) - derived.in_flight(*at) in ((0, 1) if own.split_backward else (0,))
        assert derived.deferred(*at) == own.deferred(*at)
