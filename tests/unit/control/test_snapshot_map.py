"""Who must fetch what before a start, and how what is in memory gets to disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.memory import layout_key
from seatrial.control.coordinator.snapshot_map import SnapshotMap
from seatrial.control.machine.world import World
from seatrial.control.snapshots import transfer
from seatrial.job.layout import Layout
from seatrial.job.shapes import Shape
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder

LAYOUT = Layout(shard=2, tensor=2)
SHAPES = [Shape(2, LAYOUT)]


def entry(rank: int, step: int, *, own: bool, generation: int = 1, layout: Layout = LAYOUT) -> dict[str, Any]:
    key = layout_key(layout.as_dict())
    values = {"rank": rank, "step": step, "generation": generation, "layout": key, "bytes": 9, "hash": "x"}
    return {**values, "own": own}


class Peers(dict[int, Any]):
    """Those that are here."""

    def __init__(self, *nodes: int) -> None:
        super().__init__(dict.fromkeys(nodes))

    def address(self, node: int) -> msg.AgentAddress:
        return msg.AgentAddress(node, f"10.0.0.{node}", 1000 + node)


class Map:
    """A snapshot map, what it sends, and what it says of flushes."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.sent: list[tuple[int, msg.Flush]] = []
        self.gone: set[int] = set()
        self.flushed: list[tuple[int, bool, str]] = []
        self.places = ["s3://bucket/trial", str(folder / "fallback")]
        self.map = SnapshotMap(
            self.folder, ["s3://bucket/trial"], True, self._send, lambda *what: self.flushed.append(what)
        )

    def _send(self, node: int, message: msg.ToAgent) -> bool:
        assert isinstance(message, msg.Flush)
        if node in self.gone:
            self.map.lost(node)  # the loss is told from within
            return False
        self.sent.append((node, message))
        return True

    def holds(self, node: int, *entries: dict[str, Any]) -> None:
        self.map.held(node, list(entries))

    def both_hold(self, step: int = 10) -> None:
        """Nodes 0 and 1, each with its own ranks and copies of the other's."""
        for node in (0, 1):
            self.holds(node, *(entry(r, step, own=r // 2 == node) for r in range(4)))

    def world(self) -> World:
        return World.make(3, {0: 0, 1: 1}, SHAPES, 0, 2)

    def part(self, rank: int, step: int = 10, **more: Any) -> None:
        values: dict[str, Any] = {"place": self.places[0], "ok": True, "message": ""}
        self.map.part(msg.Part(rank, step, **values | more))


@pytest.fixture
def held(tmp_path: Path) -> Map:
    (tmp_path / "checkpoints").mkdir()
    return Map(tmp_path)


class Children:
    """In place of the processes that look for what is saved, and that publish."""

    def __init__(self) -> None:
        self.began: list[str] = []  # their pids are their places in this list, from 1 on
        self.published: list[tuple[int, int, int, str]] = []  # step, generation, trained by, place
        self.saved: dict[str, Any] = {"ok": True, "message": "", "step": 0}
        self.answer: dict[str, Any] = {"ok": True, "message": ""}

    def look(self, places: Any) -> Any:
        self.began.append("look")
        return SimpleNamespace(pid=len(self.began), result=lambda: self.saved)

    def publish(
        self,
        folder: RunFolder,
        place: str,
        layout: Layout,
        step: int,
        *,
        generation: int,
        trained_by: int,
    ) -> Any:
        self.began.append("publish")
        self.published.append((step, generation, trained_by, place))
        return SimpleNamespace(pid=len(self.began), result=lambda: self.answer)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    made = Children()
    monkeypatch.setattr(transfer, "look", made.look)
    monkeypatch.setattr(transfer, "publish", made.publish)
    return made


def flush(held: Map, children: Children) -> None:
    """Ask for a flush, and answer what was looked for."""
    held.map.flush(held.world())
    assert held.map.reaped(len(children.began))


# -- before a start


def test_a_rank_with_its_own_snapshot_fetches_nothing(held: Map) -> None:
    held.both_hold()
    assert held.map.fetches({0: [0, 1]}, LAYOUT, Peers(0, 1))[0] == []  # type: ignore[arg-type]


def test_a_spare_fetches_from_the_buddy_of_the_lost_node(held: Map) -> None:
    held.both_hold()
    held.map.lost(1)
    held.holds(2)
    found = held.map.fetches({2: [2, 3]}, LAYOUT, Peers(0, 2))[2]  # type: ignore[arg-type]
    assert [(f.local, f.snapshot["rank"], f.snapshot["step"]) for f in found] == [
        (0, 2, 10),
        (1, 3, 10),
    ]
    assert found[0].source == msg.AgentAddress(0, "10.0.0.0", 1000)


def test_a_copy_counts_as_fetched_only_in_the_ranks_own_file(held: Map) -> None:
    """A spare that was the buddy holds copies: its ranks look into their own files."""
    held.holds(0, *(entry(r, 10, own=r < 2) for r in range(2)))
    held.holds(2, *(entry(r, 10, own=False) for r in (2, 3)))
    found = held.map.fetches({2: [2, 3]}, LAYOUT, Peers(0, 2))[2]  # type: ignore[arg-type]
    assert [f.snapshot["rank"] for f in found] == [2, 3]


def test_the_newest_state_held_for_every_rank(held: Map) -> None:
    held.both_hold(10)
    held.holds(
        0, entry(0, 10, own=True), entry(1, 10, own=True), entry(0, 20, own=True), entry(1, 20, own=True)
    )
    found = held.map.fetches({0: [2, 3]}, LAYOUT, Peers(0, 1))[0]  # type: ignore[arg-type]
    assert {f.snapshot["step"] for f in found} == {10}


def test_nothing_is_fetched_without_a_common_snapshot(held: Map) -> None:
    held.holds(0, entry(0, 10, own=True), entry(1, 10, own=True))
    assert held.map.fetches({1: [2, 3]}, LAYOUT, Peers(0, 1))[1] == []  # type: ignore[arg-type]
    held.both_hold()
    assert held.map.fetches({2: [2, 3]}, LAYOUT, Peers(2))[2] == [], "they are not here"  # type: ignore[arg-type]
    assert held.map.fetches({2: [2, 3]}, Layout(shard=4), Peers(0, 1))[2] == []  # type: ignore[arg-type]


REPLICAS = Layout(replicate=2, tensor=2)


def own_state(node: int, step: int = 10) -> list[dict[str, Any]]:
    """What a node of two ranks holds where nothing is copied to other nodes."""
    return [entry(2 * node + local, step, own=True, layout=REPLICAS) for local in (0, 1)]


def test_what_a_lost_node_alone_held_comes_from_its_replica(held: Map) -> None:
    held.holds(0, *own_state(0))
    held.holds(1, *own_state(1))
    assert held.map.fetches({1: [2, 3]}, REPLICAS, Peers(0, 1))[1] == []  # type: ignore[arg-type]
    held.map.lost(1)
    found = held.map.fetches({2: [2, 3]}, REPLICAS, Peers(0, 2))[2]  # type: ignore[arg-type]
    assert [(f.local, f.snapshot["rank"]) for f in found] == [(0, 0), (1, 1)]
    assert {f.source.address for f in found} == {"10.0.0.0"}
    other = Layout(shard=2, tensor=2)
    held.holds(0, *(entry(rank, 10, own=True, layout=other) for rank in (0, 1)))
    assert held.map.fetches({2: [2, 3]}, other, Peers(0, 2))[2] == [], "a shard is no replica"  # type: ignore[arg-type]


def test_a_ranks_own_state_goes_before_a_replicas(held: Map) -> None:
    held.holds(0, *own_state(0), *(dict(e, own=False) for e in own_state(1)))
    found = held.map.fetches({2: [2, 3]}, REPLICAS, Peers(0, 2))[2]  # type: ignore[arg-type]
    assert [f.snapshot["rank"] for f in found] == [2, 3]


def test_a_replica_writes_to_disk_for_the_ranks_that_are_gone(held: Map, children: Children) -> None:
    held.holds(1, *own_state(1))
    world = World.make(3, {0: 0, 1: 1}, [Shape(2, REPLICAS)], 0, 2)
    held.map.flush(world)
    held.map.reaped(1)
    ((node, message),) = held.sent
    orders = message.snapshots
    assert (node, [(o["rank"], o.get("replica")) for o in orders]) == (
        1,
        [(2, [0, True]), (3, [1, True]), (2, None), (3, None)],
    )
    for rank in range(4):
        held.part(rank)
    assert children.published == [(10, 3, 1, held.places[0])]


# -- to disk


def test_each_writes_its_own_and_then_it_is_published(held: Map, children: Children) -> None:
    held.both_hold()
    held.map.flush(held.world())
    assert (held.sent, children.began) == ([], ["look"])
    assert held.map.reaped(1)
    orders = dict(held.sent)
    assert {node: [e["rank"] for e in order.snapshots] for node, order in orders.items()} == {
        0: [0, 1],
        1: [2, 3],
    }
    assert {(o.step, o.generation, o.place, o.read_back) for o in orders.values()} == {
        (10, 3, held.places[0], True)
    }
    for rank in (3, 0, 1):
        held.part(rank)
    held.part(2, step=9)  # of a flush before
    held.part(2, place=held.places[1])
    assert children.published == []
    held.part(2)
    assert children.published == [(10, 3, 1, held.places[0])]
    assert not held.map.reaped(99)
    assert held.flushed == []
    assert held.map.reaped(2)
    assert held.flushed == [(10, True, "the state after step 10 was written from memory to disk")]


def test_what_is_on_disk_already_is_not_written(held: Map, children: Children) -> None:
    held.map.flush(None)
    held.map.flush(held.world())
    assert children.began == [], "there is nothing to look for"
    held.both_hold()
    children.saved["step"] = 10
    flush(held, children)
    assert held.sent == []
    assert held.flushed == [(0, False, ""), (0, False, ""), (10, True, "")]


def test_no_folder_is_listed_in_the_agent_s_loop(
    held: Map, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that hangs would stop the loop, and the node with it."""
    held.map._places = [str(held.folder.checkpoints)]
    monkeypatch.setattr(LocalPlace, "steps", None)
    held.both_hold()
    held.map.flush(held.world())
    assert (children.began, held.sent) == (["look"], [])
    children.saved = {"ok": False, "message": "the storage did not answer for 5 s"}
    assert held.map.reaped(1)
    assert len(held.sent) == 2


def test_where_nothing_can_be_seen_it_is_written(held: Map, children: Children) -> None:
    held.both_hold()
    children.saved = {"ok": False, "message": "cannot list s3://bucket: no answer"}
    flush(held, children)
    assert len(held.sent) == 2


@pytest.mark.parametrize("answer", ["part", "publish"])
def test_a_part_that_cannot_be_written_ends_it_once(held: Map, children: Children, answer: str) -> None:
    held.both_hold()
    flush(held, children)
    if answer == "part":
        held.part(1, ok=False, message="No space left on device")
    else:
        children.answer = {"ok": False, "message": "a later generation has begun"}
        for rank in range(4):
            held.part(rank)
        held.map.reaped(2)
    held.part(2)
    ((step, ok, message),) = held.flushed
    assert (step, ok) == (0, False)
    assert message.startswith("step 10 could not be written from memory to disk: ")


@pytest.mark.parametrize("fails", ["part", "publish"])
def test_flush_uses_the_fallback_when_the_first_place_fails(
    held: Map, children: Children, fails: str
) -> None:
    held.map._places = held.places
    held.both_hold()
    flush(held, children)
    if fails == "part":
        held.part(1, ok=False, message="No space left on device")
    else:
        children.answer = {"ok": False, "message": "Permission denied"}
        for rank in range(4):
            held.part(rank)
        held.map.reaped(2)
        children.answer = {"ok": True, "message": ""}
    held.part(0)  # of the first place
    assert [m.place for _, m in held.sent] == [held.places[0]] * 2 + [held.places[1]] * 2
    for rank in range(4):
        held.part(rank, place=held.places[1])
    assert children.published[-1] == (10, 3, 1, held.places[1])
    held.map.reaped(len(children.began))
    assert held.flushed == [(10, True, "the state after step 10 was written from memory to disk")]


def test_flush_fails_only_when_a_writing_node_is_lost(held: Map, children: Children) -> None:
    held.both_hold()
    held.holds(2)
    flush(held, children)
    held.map.lost(2)
    assert held.flushed == []
    held.part(2)
    held.part(3)
    held.map.lost(1)
    assert held.flushed == [], "its parts are written"
    held.map.lost(0)
    assert [ok for _, ok, _ in held.flushed] == [False]


def test_what_is_lost_while_it_is_looked_for(held: Map, children: Children) -> None:
    held.both_hold()
    held.map.flush(held.world())
    held.map.lost(0)
    held.map.lost(1)
    held.map.reaped(1)
    ((_, ok, message),) = held.flushed
    assert not ok
    assert "it is no longer in memory" in message


def test_a_node_that_goes_while_it_is_asked(held: Map, children: Children) -> None:
    held.both_hold()
    held.gone = {1}
    flush(held, children)
    assert [ok for _, ok, _ in held.flushed] == [False], "told once"


def test_end_of_an_earlier_publication_does_not_end_the_current(held: Map, children: Children) -> None:
    held.both_hold(10)
    flush(held, children)
    for rank in range(4):
        held.part(rank)
    held.map._end(ok=False, message="it took too long")
    held.both_hold(20)
    held.map.flush(held.world())
    assert children.began == ["look", "publish"], "one at a time"
    held.map.reaped(2)
    held.map.reaped(3)
    for rank in range(4):
        held.part(rank, step=20)
    assert [step for step, *_ in children.published] == [10, 20]
    held.map.reaped(4)
    assert [(step, ok) for step, ok, _ in held.flushed] == [(0, False), (20, True)]
