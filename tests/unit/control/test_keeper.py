"""What an agent holds in memory, and what all of them hold together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_files import KEY, LAYOUT, put

from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Filling, Snapshot, layout_key
from seatrial.control.keeper import Keeper, common, newest_common
from seatrial.job.layout import Layout

PLAIN = LAYOUT.as_dict()
OTHER = Layout(tensor=2)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    before = set(os.listdir("/proc/self/fd"))
    keeper = Keeper(2)
    yield keeper
    keeper.close()
    assert set(os.listdir("/proc/self/fd")) == before


def own(keeper: Keeper, local: int, slot: int, **what: Any) -> Snapshot:
    """A rank of `local` writes a snapshot and tells of it."""
    snapshot = put(keeper.fds(local)[slot], **what)
    return keeper.took(local, {**snapshot.to_message(), "slot": slot, "seconds": 0.1})


def copy(keeper: Keeper, **what: Any) -> Snapshot:
    """A copy comes from another node."""
    fd = os.memfd_create("elsewhere")
    snapshot = put(fd, **what)
    os.close(fd)
    room = keeper.room(snapshot)
    assert room is not None
    assert put(room, **what) == snapshot
    keeper.filled(room, snapshot)
    return snapshot


def steps(keeper: Keeper) -> list[tuple[int, int, bool]]:
    return [(h["rank"], h["step"], h["own"]) for h in keeper.held()]


def test_a_leg_is_told_what_its_files_hold_of_it(keeper: Keeper) -> None:
    assert keeper.entries_for(0, 0, PLAIN) == []
    own(keeper, 0, 0, rank=0, step=10)
    newer = own(keeper, 0, 1, rank=0, step=20)
    own(keeper, 1, 0, rank=1, step=20)
    assert [(e["slot"], e["step"]) for e in keeper.entries_for(0, 0, PLAIN)] == [(1, 20), (0, 10)]
    assert keeper.entries_for(0, 0, PLAIN)[0] == {
        "rank": 0,
        "slot": 1,
        "step": 20,
        "generation": 1,
        "bytes": newer.bytes,
        "hash": newer.hash,
    }
    assert keeper.entries_for(0, 1, PLAIN) == [], "another rank's"
    assert keeper.entries_for(0, 0, OTHER.as_dict()) == [], "of another layout"
    assert [e["step"] for e in keeper.entries_for(1, 1, PLAIN)] == [20]


def test_a_leg_is_told_of_a_replicas_state_in_its_files(keeper: Keeper) -> None:
    layout = Layout(replicate=2)
    key = layout_key(layout.as_dict())
    own(keeper, 0, 0, rank=1, step=10, layout=key)
    (entry,) = keeper.entries_for(0, 0, layout.as_dict())
    assert (entry["rank"], entry["step"]) == (1, 10)


def test_what_is_being_written_over_is_not_there(keeper: Keeper) -> None:
    own(keeper, 0, 0, step=10)
    own(keeper, 0, 1, step=20)
    Filling(keeper.fds(0)[0], 99)
    assert steps(keeper) == [(0, 20, True)]
    put(keeper.fds(0)[0], step=30)
    assert steps(keeper) == [(0, 20, True)], "its rank was killed before it could tell"


@pytest.mark.parametrize("change", [{"slot": 2}, {"slot": None}, {"step": -1}, {"hash": 5}])
def test_words_that_make_no_sense(keeper: Keeper, change: dict[str, Any]) -> None:
    snapshot = put(keeper.fds(0)[0])
    with pytest.raises(ValueError, match="snapshot"):
        keeper.took(0, {**snapshot.to_message(), "slot": 0, **change})
    assert keeper.held() == []


def test_the_summary_is_json_without_the_index(keeper: Keeper) -> None:
    snapshot = own(keeper, 0, 0, rank=3)
    (summary,) = json.loads(json.dumps(keeper.held()))
    assert summary == {**snapshot.summary(), "own": True}
    assert "index" not in summary
    assert Snapshot.from_message(summary) == snapshot


def test_copies_take_turns_too(keeper: Keeper) -> None:
    for step in (10, 20, 30):
        copy(keeper, rank=5, step=step)
    copy(keeper, rank=6, step=30)
    assert steps(keeper) == [(5, 30, False), (5, 20, False), (6, 30, False)]
    held = keeper.find(5, 20, 1, KEY)
    assert held is not None
    memory.verify(held.fd, held.snapshot.summary())
    assert keeper.find(5, 10, 1, KEY) is None
    assert keeper.find(5, 20, 2, KEY) is None


def test_a_copy_that_fails_costs_the_older_one_only(keeper: Keeper) -> None:
    copy(keeper, rank=5, step=10)
    new = copy(keeper, rank=5, step=20)
    snapshot = Snapshot(5, 30, 1, KEY, 99, "")
    room = keeper.room(snapshot)
    assert room is not None
    assert keeper.room(snapshot) is None, "one at a time"
    assert steps(keeper) == [(5, 20, False)]
    keeper.filled(room, None)
    assert steps(keeper) == [(5, 20, False)]
    assert keeper.room(new) is None, "it is here already"
    assert keeper.room(Snapshot(5, 30, 1, KEY, 99, "")) == room, "over what is not there, not over step 20"


def test_a_node_that_takes_a_place_over_gets_its_state(keeper: Keeper) -> None:
    own(keeper, 0, 1, rank=0, step=10)
    wanted = Snapshot(7, 10, 1, KEY, 99, "")
    room = keeper.room(wanted, local=0)
    assert room == keeper.fds(0)[0]
    put(room, rank=7, step=10)
    keeper.filled(room, put(room, rank=7, step=10))
    assert [e["slot"] for e in keeper.entries_for(0, 7, PLAIN)] == [0]


def test_a_start_may_need_an_older_state_than_is_here(keeper: Keeper) -> None:
    """Step 30 is here and not elsewhere; the newest that all have is 20, which is elsewhere and not here."""
    own(keeper, 0, 0, rank=0, step=10)
    own(keeper, 0, 1, rank=0, step=30)
    older = Snapshot(0, 20, 1, KEY, 99, "")
    assert keeper.room(Snapshot(0, 30, 1, KEY, 99, ""), local=0) is None, "it is here"
    room = keeper.room(older, local=0)
    assert room == keeper.fds(0)[0]
    keeper.filled(room, put(room, rank=0, step=20))
    assert [e["step"] for e in keeper.entries_for(0, 0, PLAIN)] == [30, 20]
    copy(keeper, rank=5, step=30)
    assert keeper.room(Snapshot(5, 20, 1, KEY, 99, "")) is None, "a copy is only replaced by a newer one"


def test_memory_for_ranks_of_others_is_given_back(keeper: Keeper) -> None:
    for rank in (4, 5, 6):
        copy(keeper, rank=rank, step=10)
    assert keeper.room(Snapshot(6, 20, 1, KEY, 99, "")) is not None
    before = len(os.listdir("/proc/self/fd"))
    keeper.guard([5], PLAIN)
    assert len(os.listdir("/proc/self/fd")) == before - 2, "6 is being written to"
    assert steps(keeper) == [(5, 10, False), (6, 10, False)]
    keeper.guard([5], OTHER.as_dict())
    assert steps(keeper) == [(6, 10, False)]


def test_a_course_that_was_left_is_forgotten(keeper: Keeper) -> None:
    own(keeper, 0, 0, rank=0, step=60)
    own(keeper, 0, 1, rank=0, step=70)
    copy(keeper, rank=5, step=70)
    own(keeper, 1, 0, rank=1, step=70, generation=2)
    keeper.began(2, 60)
    assert steps(keeper) == [(0, 60, True), (1, 70, True)]


def test_after_a_rollback_the_same_steps_come_again_with_other_content(keeper: Keeper) -> None:
    own(keeper, 0, 0, rank=0, step=60)
    own(keeper, 0, 1, rank=0, step=70)
    copy(keeper, rank=5, step=70)
    own(keeper, 1, 0, rank=1, step=70, generation=2)
    keeper.forget(1, 60)
    assert steps(keeper) == [(0, 60, True), (1, 70, True)]
    own(keeper, 0, 1, rank=0, step=70)
    copy(keeper, rank=5, step=65)
    assert steps(keeper) == [(0, 70, True), (0, 60, True), (1, 70, True), (5, 65, False)]


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
    limited = newest_common(held, PLAIN, 2, at_most=19)
    assert limited is not None
    assert limited.step == 10
    assert newest_common(held, PLAIN, 3) is None
    assert newest_common(held, OTHER.as_dict(), 2) is None
    assert newest_common({}, PLAIN, 2) is None


def test_a_node_that_is_gone_is_made_up_for_by_its_copy() -> None:
    held = {n: [entry(n, 30), entry((n + 1) % 3, 30, own=False)] for n in range(3)}
    for gone in range(3):
        rest = {n: entries for n, entries in held.items() if n != gone}
        found = newest_common(rest, PLAIN, 3)
        assert found is not None
        assert found.holders[gone] == [(gone - 1) % 3]
    assert newest_common({0: held[0]}, PLAIN, 3) is None


def test_generations_are_never_mixed() -> None:
    """The same step of two courses is two states; of two whole ones the later course counts."""
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
def test_it_names_all_that_have_it_and_nobody_else(held: dict[int, list[dict[str, Any]]], world: int) -> None:
    found = common(held, PLAIN, world)
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
