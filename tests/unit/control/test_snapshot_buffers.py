"""What an agent holds in memory, and what all of them hold together."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_files import KEY, LAYOUT, filled, put

from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Filling, Snapshot, layout_key
from seatrial.control.snapshots.snapshot_buffers import SnapshotBuffers, common, newest_common
from seatrial.job.layout import Layout

PLAIN = LAYOUT.as_dict()
OTHER = Layout(tensor=2)


@pytest.fixture
def snapshot_buffers() -> Iterator[SnapshotBuffers]:
    before = set(os.listdir("/proc/self/fd"))
    snapshot_buffers = SnapshotBuffers(2)
    yield snapshot_buffers
    snapshot_buffers.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def own(snapshot_buffers: SnapshotBuffers, local: int, slot: int, **what: Any) -> Snapshot:
    """A rank of `local` writes a snapshot and tells of it."""
    snapshot = put(snapshot_buffers.fds(local)[slot], **what)
    return snapshot_buffers.rank_filled(local, filled(snapshot, slot))


def copy(snapshot_buffers: SnapshotBuffers, **what: Any) -> Snapshot:
    """A copy comes from another node."""
    fd = os.memfd_create("elsewhere")
    snapshot = put(fd, **what)
    os.close(fd)
    buffer_for = snapshot_buffers.buffer_for(snapshot)
    assert buffer_for is not None
    assert put(buffer_for, **what) == snapshot
    snapshot_buffers.filled(buffer_for, snapshot)
    return snapshot


def steps(snapshot_buffers: SnapshotBuffers) -> list[tuple[int, int, bool]]:
    return [(h["rank"], h["step"], h["own"]) for h in snapshot_buffers.held()]


def test_a_rank_spec_lists_the_rank_s_own_snapshots(snapshot_buffers: SnapshotBuffers) -> None:
    assert snapshot_buffers.entries_for(0, 0, PLAIN) == []
    own(snapshot_buffers, 0, 0, rank=0, step=10)
    newer = own(snapshot_buffers, 0, 1, rank=0, step=20)
    own(snapshot_buffers, 1, 0, rank=1, step=20)
    assert [(e["slot"], e["step"]) for e in snapshot_buffers.entries_for(0, 0, PLAIN)] == [(1, 20), (0, 10)]
    assert snapshot_buffers.entries_for(0, 0, PLAIN)[0] == {
        "rank": 0,
        "slot": 1,
        "step": 20,
        "generation": 1,
        "bytes": newer.bytes,
        "hash": newer.hash,
    }
    assert snapshot_buffers.entries_for(0, 1, PLAIN) == [], "another rank's"
    assert snapshot_buffers.entries_for(0, 0, OTHER.as_dict()) == [], "of another layout"
    assert [e["step"] for e in snapshot_buffers.entries_for(1, 1, PLAIN)] == [20]


def test_a_rank_spec_lists_a_replica_s_snapshots(snapshot_buffers: SnapshotBuffers) -> None:
    layout = Layout(replicate=2)
    key = layout_key(layout.as_dict())
    own(snapshot_buffers, 0, 0, rank=1, step=10, layout=key)
    (entry,) = snapshot_buffers.entries_for(0, 0, layout.as_dict())
    assert (entry["rank"], entry["step"]) == (1, 10)


def test_a_snapshot_being_overwritten_is_not_listed(snapshot_buffers: SnapshotBuffers) -> None:
    own(snapshot_buffers, 0, 0, step=10)
    own(snapshot_buffers, 0, 1, step=20)
    Filling(snapshot_buffers.fds(0)[0], 99)
    assert steps(snapshot_buffers) == [(0, 20, True)]
    put(snapshot_buffers.fds(0)[0], step=30)
    assert steps(snapshot_buffers) == [(0, 20, True)], "its rank was killed before it could tell"


@pytest.mark.parametrize("change", [{"slot": 2}, {"slot": -1}, {"step": -1}, {"bytes": -1}])
def test_words_that_make_no_sense(snapshot_buffers: SnapshotBuffers, change: dict[str, Any]) -> None:
    snapshot = put(snapshot_buffers.fds(0)[0])
    with pytest.raises(ValueError, match="snapshot"):
        snapshot_buffers.rank_filled(0, dataclasses.replace(filled(snapshot, 0), **change))
    assert snapshot_buffers.held() == []


def test_the_summary_is_json_without_the_index(snapshot_buffers: SnapshotBuffers) -> None:
    snapshot = own(snapshot_buffers, 0, 0, rank=3)
    (summary,) = json.loads(json.dumps(snapshot_buffers.held()))
    assert summary == {**snapshot.summary(), "own": True}
    assert "index" not in summary
    assert Snapshot.from_message(summary) == snapshot


def test_copies_take_turns_too(snapshot_buffers: SnapshotBuffers) -> None:
    for step in (10, 20, 30):
        copy(snapshot_buffers, rank=5, step=step)
    copy(snapshot_buffers, rank=6, step=30)
    assert steps(snapshot_buffers) == [(5, 30, False), (5, 20, False), (6, 30, False)]
    held = snapshot_buffers.find(5, 20, 1, KEY)
    assert held is not None
    memory.verify(held.fd, held.snapshot.summary())
    assert snapshot_buffers.find(5, 10, 1, KEY) is None
    assert snapshot_buffers.find(5, 20, 2, KEY) is None


def test_a_copy_that_fails_costs_the_older_one_only(snapshot_buffers: SnapshotBuffers) -> None:
    copy(snapshot_buffers, rank=5, step=10)
    new = copy(snapshot_buffers, rank=5, step=20)
    snapshot = Snapshot(5, 30, 1, KEY, 99, "")
    buffer_for = snapshot_buffers.buffer_for(snapshot)
    assert buffer_for is not None
    assert snapshot_buffers.buffer_for(snapshot) is None, "one at a time"
    assert steps(snapshot_buffers) == [(5, 20, False)]
    snapshot_buffers.filled(buffer_for, None)
    assert steps(snapshot_buffers) == [(5, 20, False)]
    assert snapshot_buffers.buffer_for(new) is None, "it is here already"
    assert snapshot_buffers.buffer_for(Snapshot(5, 30, 1, KEY, 99, "")) == buffer_for, (
        "over what is not there, not over step 20"
    )


def test_a_node_that_takes_a_place_over_gets_its_state(snapshot_buffers: SnapshotBuffers) -> None:
    own(snapshot_buffers, 0, 1, rank=0, step=10)
    wanted = Snapshot(7, 10, 1, KEY, 99, "")
    buffer_for = snapshot_buffers.buffer_for(wanted, local=0)
    assert buffer_for == snapshot_buffers.fds(0)[0]
    put(buffer_for, rank=7, step=10)
    snapshot_buffers.filled(buffer_for, put(buffer_for, rank=7, step=10))
    assert [e["slot"] for e in snapshot_buffers.entries_for(0, 7, PLAIN)] == [0]


def test_a_start_may_need_an_older_state_than_is_here(snapshot_buffers: SnapshotBuffers) -> None:
    """Step 30 is here and not elsewhere; the newest that all have is 20, which is elsewhere and not here."""
    own(snapshot_buffers, 0, 0, rank=0, step=10)
    own(snapshot_buffers, 0, 1, rank=0, step=30)
    older = Snapshot(0, 20, 1, KEY, 99, "")
    assert snapshot_buffers.buffer_for(Snapshot(0, 30, 1, KEY, 99, ""), local=0) is None, "it is here"
    buffer_for = snapshot_buffers.buffer_for(older, local=0)
    assert buffer_for == snapshot_buffers.fds(0)[0]
    snapshot_buffers.filled(buffer_for, put(buffer_for, rank=0, step=20))
    assert [e["step"] for e in snapshot_buffers.entries_for(0, 0, PLAIN)] == [30, 20]
    copy(snapshot_buffers, rank=5, step=30)
    assert snapshot_buffers.buffer_for(Snapshot(5, 20, 1, KEY, 99, "")) is None, (
        "a copy is only replaced by a newer one"
    )


def test_memory_for_ranks_of_others_is_given_back(snapshot_buffers: SnapshotBuffers) -> None:
    for rank in (4, 5, 6):
        copy(snapshot_buffers, rank=rank, step=10)
    assert snapshot_buffers.buffer_for(Snapshot(6, 20, 1, KEY, 99, "")) is not None
    before = len(os.listdir("/proc/self/fd"))
    snapshot_buffers.guard([5], PLAIN)
    assert len(os.listdir("/proc/self/fd")) == before - 2, "6 is being written to"
    assert steps(snapshot_buffers) == [(5, 10, False), (6, 10, False)]
    snapshot_buffers.guard([5], OTHER.as_dict())
    assert steps(snapshot_buffers) == [(6, 10, False)]


def test_a_course_that_was_left_is_forgotten(snapshot_buffers: SnapshotBuffers) -> None:
    own(snapshot_buffers, 0, 0, rank=0, step=60)
    own(snapshot_buffers, 0, 1, rank=0, step=70)
    copy(snapshot_buffers, rank=5, step=70)
    own(snapshot_buffers, 1, 0, rank=1, step=70, generation=2)
    snapshot_buffers.generation_started(2, 60)
    assert steps(snapshot_buffers) == [(0, 60, True), (1, 70, True)]


def test_steps_repeated_after_rollback_replace_their_snapshots(
    snapshot_buffers: SnapshotBuffers,
) -> None:
    own(snapshot_buffers, 0, 0, rank=0, step=60)
    own(snapshot_buffers, 0, 1, rank=0, step=70)
    copy(snapshot_buffers, rank=5, step=70)
    own(snapshot_buffers, 1, 0, rank=1, step=70, generation=2)
    snapshot_buffers.forget(1, 60)
    assert steps(snapshot_buffers) == [(0, 60, True), (1, 70, True)]
    own(snapshot_buffers, 0, 1, rank=0, step=70)
    copy(snapshot_buffers, rank=5, step=65)
    assert steps(snapshot_buffers) == [(0, 70, True), (0, 60, True), (1, 70, True), (5, 65, False)]


# -- what all nodes hold


def entry(
    rank: int, step: int, generation: int = 1, *, own: bool = True, layout: str = KEY
) -> dict[str, Any]:
    return {**Snapshot(rank, step, generation, layout, 1, "").summary(), "own": own}


def test_the_newest_state_that_is_whole() -> None:
    held = {
        0: [entry(0, 20), entry(0, 10), entry(1, 10, own=False)],
        1: [entry(1, 10), entry(0, 20, own=False)],
    }
    found = newest_common(held, PLAIN, 2)
    assert found is not None
    assert (found.step, found.generation) == (10, 1)
    assert found.holders == {0: [0], 1: [1, 0]}, "the rank's own node first"
    held[0].append(entry(1, 20, own=False))
    found = newest_common(held, PLAIN, 2)
    assert found is not None
    assert (found.step, found.holders) == (20, {0: [0, 1], 1: [0]})
    assert [c.step for c in common(held, PLAIN, 2)] == [20, 10]
    assert newest_common(held, PLAIN, 3) is None
    assert newest_common(held, OTHER.as_dict(), 2) is None
    assert newest_common({}, PLAIN, 2) is None


def test_a_lost_node_is_replaced_by_its_copy() -> None:
    held = {n: [entry(n, 30), entry((n + 1) % 3, 30, own=False)] for n in range(3)}
    for gone in range(3):
        rest = {n: entries for n, entries in held.items() if n != gone}
        found = newest_common(rest, PLAIN, 3)
        assert found is not None
        assert found.holders[gone] == [(gone - 1) % 3]
    assert newest_common({0: held[0]}, PLAIN, 3) is None


def test_generations_are_never_mixed() -> None:
    """The same step of two generations is two states; of two complete ones the later generation counts."""
    assert newest_common({0: [entry(0, 50, 1)], 1: [entry(1, 50, 2)]}, PLAIN, 2) is None
    held = {n: [entry(n, 60, 1), entry(n, 50, 2)] for n in (0, 1)}
    found = newest_common(held, PLAIN, 2)
    assert found is not None
    assert (found.generation, found.step) == (2, 50)


ENTRIES = st.lists(
    st.builds(
        entry,
        st.integers(0, 3),
        st.sampled_from([10, 20]),
        st.integers(1, 2),
        own=st.booleans(),
        layout=st.sampled_from([KEY, layout_key(OTHER.as_dict())]),
    ),
    max_size=8,
)


@given(st.dictionaries(st.integers(0, 4), ENTRIES, max_size=5), st.integers(1, 4))
def test_it_names_exactly_the_nodes_that_have_it(held: dict[int, list[dict[str, Any]]], world: int) -> None:
    found = list(common(held, PLAIN, world))
    moments = [(g, s) for g in (2, 1) for s in (20, 10)]
    expected = []
    for generation, step in moments:
        nodes = {
            rank: {
                n
                for n, entries in held.items()
                for e in entries
                if (e["rank"], e["step"], e["generation"], e["layout"]) == (rank, step, generation, KEY)
            }
            for rank in range(world)
        }
        if all(nodes.values()):
            expected.append((generation, step, nodes))
    assert [(c.generation, c.step, {r: set(n) for r, n in c.holders.items()}) for c in found] == expected
