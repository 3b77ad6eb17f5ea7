"""The state a generation resumes from: the newest that every rank can get, the fastest to load among equals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.job.layout import Coordinates, Layout
from seatrial.train.recovery.recover import (
    NO_SNAPSHOT,
    NO_STEP,
    Offer,
    SnapshotId,
    Source,
    decide,
    from_memory,
)

ONE = Layout()
PAIR = Layout(shard=2)
REPLICAS = Layout(replicate=2, tensor=2)  # ranks 0, 1 and their replicas 2, 3


def alive(offer: Offer, step: int) -> bool:
    """It holds the state after `step`, or that before it and the gradients of `step`."""
    return step in (offer.applied, offer.ready)


@st.composite
def offers(draw: st.DrawFn) -> tuple[Layout, list[Offer], int]:
    """What can happen: all ranks of one course, the last step applied by some and ready in others, some ranks new."""
    layout = Layout(
        pipeline=draw(st.integers(1, 2)),
        replicate=draw(st.integers(1, 3)),
        shard=draw(st.integers(1, 2)),
        tensor=draw(st.integers(1, 2)),
    )
    newest = draw(st.integers(0, 9))
    moments = st.sampled_from([NO_SNAPSHOT, (1, 3), (1, 6), (2, 5), (2, 7)])
    shared = draw(st.lists(moments, min_size=2, max_size=2, unique=True))
    lost = draw(st.sampled_from([0, 0, 0, 1, 4]))  # of ten files

    def memory() -> tuple[SnapshotId, SnapshotId]:
        first, second = (NO_SNAPSHOT if draw(st.integers(0, 9)) < lost else moment for moment in shared)
        return first, second

    made = []
    for _ in range(layout.world_size):
        kind = draw(st.sampled_from(["applied", "applied", "ready", "behind", "new"]))
        if kind == "applied":
            made.append(Offer(newest, NO_STEP, memory()))
        elif kind == "ready" and newest > 0:
            made.append(Offer(newest - 1, newest, memory()))
        elif (
            kind == "behind" and newest > 0
        ):  # its state was altered, or it stopped in the midst of an update
            made.append(Offer(newest - 1, NO_STEP, memory()))
        else:
            made.append(Offer(NO_STEP, NO_STEP, memory()))
    return layout, made, draw(st.sampled_from([0, 0, 2, 5, 7, 9]))


def possible(layout: Layout, made: Sequence[Offer], disk: int) -> list[tuple[int, int, str]]:
    """(step, nearness, kind) of every source that every rank has, by the rules in words."""
    found = []
    applied = max(o.applied for o in made)
    if applied >= 0:
        places: dict[tuple[int, int, int], list[bool]] = {}
        for rank, offer in enumerate(made):
            at = layout.coordinates(rank)
            places.setdefault((at.pipeline, at.shard, at.tensor), []).append(alive(offer, applied))
        if all(all(there) for there in places.values()):
            found.append((applied, 3, "carried"))
        elif all(any(there) for there in places.values()):
            found.append((applied, 2, "replica"))
    common = [m for m in made[0].memory if m != NO_SNAPSHOT and all(m in o.memory for o in made)]
    if common:
        found.append((max(common)[1], 1, "memory"))
    if disk:
        found.append((disk, 0, "disk"))
    return found


@given(offers())
def test_recovery_uses_newest_state_all_can_get_nearest_first(
    case: tuple[Layout, list[Offer], int],
) -> None:
    layout, made, disk = case
    source = decide(made, layout, disk)
    sources = possible(layout, made, disk)
    if not sources:
        assert source == Source("fresh", 0)
    else:
        step, _, kind = max(sources)
        assert (source.step, source.kind) == (step, kind)


@given(offers())
def test_state_is_broadcast_from_a_live_replica(case: tuple[Layout, list[Offer], int]) -> None:
    layout, made, disk = case
    source = decide(made, layout, disk)
    for rank, offer in enumerate(made):
        root = source.root(made, layout, rank)
        if source.kind != "replica" or alive(offer, source.step):
            assert root is None
            continue
        assert root is not None
        assert alive(made[root], source.step)
        own, its = layout.coordinates(rank), layout.coordinates(root)
        assert (own.pipeline, own.shard, own.tensor) == (its.pipeline, its.shard, its.tensor)
        others = [
            layout.rank(Coordinates(own.pipeline, r, own.shard, own.tensor)) for r in range(layout.replicate)
        ]
        roots = {source.root(made, layout, other) for other in others} - {None}
        assert roots == {root}, "all of a place take it from the same one, in one broadcast"


@given(offers())
def test_from_memory_chooses_a_snapshot_of_all_ranks(case: tuple[Layout, list[Offer], int]) -> None:
    _, made, _ = case
    source = from_memory(made)
    if source is not None:
        assert all((source.generation, source.step) in o.memory for o in made)


@given(offers())
def test_decision_is_independent_of_the_order_of_files(case: tuple[Layout, list[Offer], int]) -> None:
    layout, made, disk = case
    swapped = [Offer(o.applied, o.ready, (o.memory[1], o.memory[0])) for o in made]
    assert decide(swapped, layout, disk) == decide(made, layout, disk)


# -- every rule by an example


def test_no_state_starts_fresh() -> None:
    assert decide([Offer()] * 2, PAIR, 0) == Source("fresh", 0)


def test_state_of_all_live_processes_is_carried() -> None:
    assert decide([Offer(7), Offer(7)], PAIR, 7) == Source("carried", 7)


def test_state_before_the_first_step_is_carried() -> None:
    assert decide([Offer(0), Offer(0)], PAIR, 0) == Source("carried", 0)


def test_rank_without_the_sum_can_still_finish_the_step() -> None:
    assert decide([Offer(7), Offer(6, 7)], PAIR, 0) == Source("carried", 7)


def test_gradients_that_no_rank_applied_are_not_used() -> None:
    """Nobody knows their norm."""
    assert decide([Offer(6, 7), Offer(6, 7)], PAIR, 0) == Source("carried", 6)


def test_a_new_rank_needs_a_replica() -> None:
    made = [Offer(7), Offer(7), Offer(), Offer(7)]
    source = decide(made, REPLICAS, 7)
    assert source == Source("replica", 7)
    assert [source.root(made, REPLICAS, r) for r in range(4)] == [None, None, 0, None]
    assert decide([Offer(7), Offer()], PAIR, 5) == Source("disk", 5), "a shard is nobody's replica"


def test_a_replica_that_can_finish_the_step_is_a_source() -> None:
    made = [Offer(6, 7), Offer(7), Offer(), Offer()]
    source = decide(made, REPLICAS, 0)
    assert source == Source("replica", 7)
    assert [source.root(made, REPLICAS, r) for r in range(4)] == [None, None, 0, 1]


def test_a_rank_one_step_behind_receives_its_replicas_state() -> None:
    made = [Offer(7), Offer(7), Offer(6), Offer(7)]
    assert decide(made, REPLICAS, 0).root(made, REPLICAS, 2) == 0


def test_without_a_live_replica_snapshots_are_next() -> None:
    held = ((1, 5), NO_SNAPSHOT)
    made = [
        Offer(NO_STEP, NO_STEP, held),
        Offer(7, NO_STEP, held),
        Offer(NO_STEP, NO_STEP, held),
        Offer(7, NO_STEP, held),
    ]
    assert decide(made, REPLICAS, 3) == Source("memory", 5, 1)
    assert decide(made, REPLICAS, 5) == Source("memory", 5, 1), "nearer than the disk"
    assert decide(made, REPLICAS, 6) == Source("disk", 6)


def test_snapshots_must_be_of_one_generation() -> None:
    """The same step of another course is another state."""
    made = [Offer(memory=((1, 5), (2, 5))), Offer(memory=((1, 5), NO_SNAPSHOT))]
    assert from_memory(made) == Source("memory", 5, 1)
    assert from_memory([Offer(memory=((2, 5), NO_SNAPSHOT)), Offer(memory=((1, 5), NO_SNAPSHOT))]) is None


def test_a_snapshot_of_a_later_generation_is_newer() -> None:
    both: tuple[SnapshotId, SnapshotId] = ((1, 9), (2, 6))
    assert from_memory([Offer(memory=both), Offer(memory=both)]) == Source("memory", 6, 2)


@pytest.mark.parametrize("disk", [1, 8])
def test_a_checkpoint_that_is_newest_wins(disk: int) -> None:
    made = [Offer(7, NO_STEP, ((1, 5), NO_SNAPSHOT)), Offer(NO_STEP, NO_STEP, ((1, 5), NO_SNAPSHOT))]
    assert decide(made, PAIR, disk) == (Source("disk", 8) if disk == 8 else Source("memory", 5, 1))


def test_a_single_rank() -> None:
    assert decide([Offer(3)], ONE, 2) == Source("carried", 3)
    assert decide([Offer()], ONE, 2) == Source("disk", 2)
