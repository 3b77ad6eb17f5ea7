"""Who must fetch what before a start, and how what is in memory gets to disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checkpoint.memory import layout_key
from seatrial.control import transfer
from seatrial.control.snapshots import SnapshotMap
from seatrial.control.world import World
from seatrial.job.layout import Layout
from seatrial.job.shapes import Shape
from seatrial.record.folder import RunFolder

LAYOUT = Layout(replicate=2, tensor=2)
SHAPES = [Shape(2, LAYOUT)]


def entry(rank: int, step: int, *, own: bool, generation: int = 1, layout: Layout = LAYOUT) -> dict[str, Any]:
    key = layout_key(layout.as_dict())
    values = {"rank": rank, "step": step, "generation": generation, "layout": key, "bytes": 9, "sha256": "x"}
    return {**values, "own": own}


class Peers(dict[int, Any]):
    """Those that are here."""

    def __init__(self, *nodes: int) -> None:
        super().__init__({n: SimpleNamespace(address=f"10.0.0.{n}", port=1000 + n) for n in nodes})


class Map:
    """A snapshot map, what it sends, and what it says of flushes."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.gone: set[int] = set()
        self.flushed: list[tuple[int, bool, str]] = []
        self.map = SnapshotMap(self.folder, self._send, lambda *what: self.flushed.append(what))

    def _send(self, node: int, message: dict[str, Any]) -> bool:
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
        self.map.part({"rank": rank, "step": step, "ok": True, "message": "", **more})


@pytest.fixture
def held(tmp_path: Path) -> Map:
    (tmp_path / "checkpoints").mkdir()
    return Map(tmp_path)


class Publishing:
    """In place of the process that publishes."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []  # step, generation, trained by
        self.answer: dict[str, Any] = {"ok": True, "message": ""}

    def __call__(
        self, folder: RunFolder, layout: Layout, step: int, *, generation: int, trained_by: int
    ) -> Any:
        self.asked.append((step, generation, trained_by))
        return SimpleNamespace(pid=len(self.asked), result=lambda: self.answer)


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Publishing:
    made = Publishing()
    monkeypatch.setattr(transfer, "publish", made)
    return made


# -- before a start


def test_who_has_its_own_fetches_nothing(held: Map) -> None:
    held.both_hold()
    assert held.map.fetches(0, [0, 1], LAYOUT, Peers(0, 1)) == []  # type: ignore[arg-type]


def test_a_spare_fetches_from_the_buddy_of_the_lost_node(held: Map) -> None:
    held.both_hold()
    held.map.lost(1)
    held.holds(2)
    found = held.map.fetches(2, [2, 3], LAYOUT, Peers(0, 2))  # type: ignore[arg-type]
    assert [(f["local"], f["snapshot"]["rank"], f["snapshot"]["step"]) for f in found] == [
        (0, 2, 10),
        (1, 3, 10),
    ]
    assert found[0]["from"] == {"address": "10.0.0.0", "port": 1000}


def test_a_copy_counts_as_fetched_only_in_the_ranks_own_file(held: Map) -> None:
    """A spare that was the buddy holds copies: its ranks look into their own files."""
    held.holds(0, *(entry(r, 10, own=r < 2) for r in range(2)))
    held.holds(2, *(entry(r, 10, own=False) for r in (2, 3)))
    found = held.map.fetches(2, [2, 3], LAYOUT, Peers(0, 2))  # type: ignore[arg-type]
    assert [f["snapshot"]["rank"] for f in found] == [2, 3]


def test_the_newest_that_somebody_has_of_every_rank(held: Map) -> None:
    held.both_hold(10)
    held.holds(
        0, entry(0, 10, own=True), entry(1, 10, own=True), entry(0, 20, own=True), entry(1, 20, own=True)
    )
    found = held.map.fetches(0, [2, 3], LAYOUT, Peers(0, 1))  # type: ignore[arg-type]
    assert {f["snapshot"]["step"] for f in found} == {10}


def test_nothing_common_or_nobody_who_has_it_is_left_to_the_disk(held: Map) -> None:
    held.holds(0, entry(0, 10, own=True), entry(1, 10, own=True))
    assert held.map.fetches(1, [2, 3], LAYOUT, Peers(0, 1)) == []  # type: ignore[arg-type]
    held.both_hold()
    assert held.map.fetches(2, [2, 3], LAYOUT, Peers(2)) == [], "they are not here"  # type: ignore[arg-type]
    assert held.map.fetches(2, [2, 3], Layout(shard=4), Peers(0, 1)) == []  # type: ignore[arg-type]


# -- to disk


def test_each_writes_its_own_and_then_it_is_published(held: Map, publishing: Publishing) -> None:
    held.both_hold()
    held.map.flush(held.world())
    orders = {node: message["flush"] for node, message in held.sent}
    assert {node: [e["rank"] for e in order["snapshots"]] for node, order in orders.items()} == {
        0: [0, 1],
        1: [2, 3],
    }
    assert {(o["step"], o["generation"]) for o in orders.values()} == {(10, 3)}
    for rank in (3, 0, 1):
        held.part(rank)
    held.part(2, step=9)  # of a flush before
    assert publishing.asked == []
    held.part(2)
    assert publishing.asked == [(10, 3, 1)]
    assert not held.map.reaped(99)
    assert held.flushed == []
    assert held.map.reaped(1)
    assert held.flushed == [(10, True, "the state after step 10 went from memory to disk")]


def test_what_is_on_disk_already_is_not_written(held: Map) -> None:
    held.map.flush(None)
    held.map.flush(held.world())
    held.both_hold()
    (held.folder.checkpoints / "step-00000010").mkdir()
    held.map.flush(held.world())
    assert held.sent == []
    assert held.flushed == [(0, False, ""), (0, False, ""), (10, True, "")]


@pytest.mark.parametrize("answer", ["part", "publish"])
def test_a_part_that_cannot_be_written_ends_it_once(held: Map, publishing: Publishing, answer: str) -> None:
    held.both_hold()
    held.map.flush(held.world())
    if answer == "part":
        held.part(1, ok=False, message="No space left on device")
    else:
        publishing.answer = {"ok": False, "message": "a later generation has begun"}
        for rank in range(4):
            held.part(rank)
        held.map.reaped(1)
    held.part(2)
    ((step, ok, message),) = held.flushed
    assert (step, ok) == (0, False)
    assert message.startswith("step 10 could not be written from memory to disk: ")


def test_the_loss_of_a_node_that_writes_ends_it_and_that_of_another_does_not(
    held: Map, publishing: Publishing
) -> None:
    held.both_hold()
    held.holds(2)
    held.map.flush(held.world())
    held.map.lost(2)
    assert held.flushed == []
    held.part(2)
    held.part(3)
    held.map.lost(1)
    assert held.flushed == [], "its parts are written"
    held.map.lost(0)
    assert [ok for _, ok, _ in held.flushed] == [False]


def test_a_node_that_goes_while_it_is_asked(held: Map) -> None:
    held.both_hold()
    held.gone = {1}
    held.map.flush(held.world())
    assert [ok for _, ok, _ in held.flushed] == [False], "told once"


def test_the_end_of_an_earlier_publication_is_not_taken_for_this_one(
    held: Map, publishing: Publishing
) -> None:
    held.both_hold(10)
    held.map.flush(held.world())
    for rank in range(4):
        held.part(rank)
    held.map._end(ok=False, message="it took too long")
    held.both_hold(20)
    held.map.flush(held.world())
    for rank in range(4):
        held.part(rank, step=20)
    assert [step for step, *_ in publishing.asked] == [10], "one at a time"
    held.map.reaped(1)
    assert [step for step, *_ in publishing.asked] == [10, 20]
    held.map.reaped(2)
    assert [(step, ok) for step, ok, _ in held.flushed] == [(0, False), (20, True)]
