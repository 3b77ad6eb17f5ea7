"""Snapshots of one node: copied to the buddy, fetched before a start, written to disk; and never in the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_files import KEY, LAYOUT, put
from wired import SECRET, Pump

from seatrial.base import process
from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Snapshot
from seatrial.control import transfer
from seatrial.control.keeper import Held
from seatrial.control.reception import Reception
from seatrial.control.spec import AgentSpec
from seatrial.control.vault import Vault
from seatrial.control.wire import Listener, Outgoing
from seatrial.record.folder import RunFolder

PLAIN = LAYOUT.as_dict()


class Node:
    """A vault behind a door of its own."""

    def __init__(self, pump: Pump, folder: Path, number: int) -> None:
        spec = AgentSpec(
            run=folder,
            generation=1,
            node=number,
            nodes=2,
            ranks_per_node=2,
            device="cpu",
        )
        self.told: list[dict[str, Any]] = []
        self.vault = Vault(spec, self.told.append)
        self.vault.unlock(SECRET)
        self.pump = pump
        self.listener = Listener("127.0.0.1", SECRET)
        self.reception = Reception(self.listener, pump.watch, pump.unwatch, self.vault.serve)
        self.started: list[int] = []

    @property
    def where(self) -> dict[str, Any]:
        return {"node": 0, "address": "127.0.0.1", "port": self.listener.port}

    def takes(self, local: int, slot: int, **what: Any) -> Snapshot:
        """A rank of `local` fills one of its files and says so."""
        snapshot = put(self.vault.fds()[local][slot], **what)
        self.vault.took(local, {**snapshot.to_message(), "slot": slot, "seconds": 0.1})
        return snapshot

    def order(self, generation: int, *fetch: dict[str, Any], buddy: Node | None = None) -> None:
        """A start, after which `started` has its generation."""
        values = {
            "buddy": None if buddy is None else buddy.where,
            "guards": [0, 1, 2, 3],
            "layout": PLAIN,
            "fetch": list(fetch),
        }
        self.vault.guard(values, lambda: self.started.append(generation))

    def held(self) -> list[tuple[int, int, bool]]:
        """(rank, step, own) of everything here."""
        return sorted((e["rank"], e["step"], e["own"]) for e in self.vault.held())

    def leave(self) -> None:
        """As if its process had ended."""
        self.pump.unwatch(self.listener)
        self.listener.close()


def wanted(snapshot: Snapshot, giver: Node, local: int = 0) -> dict[str, Any]:
    return {"local": local, "snapshot": snapshot.summary(), "from": giver.where}


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def nodes(pump: Pump, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    before = process.descendants(os.getpid())  # services that other tests use
    both = Node(pump, tmp_path, 0), Node(pump, tmp_path, 1)

    def reaped(pid: int, status: int) -> None:
        assert any(node.vault.reaped(pid, status) for node in both)

    pump.ticks.append(lambda: process.reap(reaped))
    yield both
    process.kill_all(lambda: process.descendants(os.getpid()) - before)
    process.reap(lambda pid, status: None)
    pump.close()
    for node in both:
        node.vault._keeper.close()


def quiet(node: Node) -> bool:
    return not node.vault._moving


def test_a_snapshot_is_told_and_copied_to_the_buddy(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    here.order(1, buddy=there)
    assert here.started == [1], "nothing to wait for"
    snapshot = here.takes(0, 0, rank=2, step=10)
    assert here.told[-1]["held"][0]["step"] == 10
    pump.until(lambda: there.held())
    assert there.held() == [(2, 10, False)]
    (held,) = there.told[-1]["held"]
    assert (held["hash"], held["layout"]) == (snapshot.hash, KEY)


def test_while_one_is_copied_only_the_newest_waits(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    here.order(1, buddy=there)
    here.takes(0, 0, step=10, size=2_000_000)
    for step in range(11, 20):
        here.takes(0, step % 2, step=step)
    pump.until(lambda: any(step == 19 for _, step, _ in there.held()))
    pump.until(lambda: quiet(here) and quiet(there))
    assert {step for _, step, _ in there.held()} <= {10, 19}


def test_a_newer_copy_that_comes_too_early_waits(nodes: tuple[Node, Node], pump: Pump) -> None:
    """Its giver knows of the end of the last one before the taker does."""
    here, there = nodes
    here.order(1, buddy=there)
    here.takes(0, 0, rank=2, step=10, size=30_000_000)
    pump.until(lambda: there.vault._receiving)
    (taker,) = there.vault._moving
    os.kill(taker, signal.SIGSTOP)

    def waiting(step: int) -> bool:
        incoming = there.vault._receiving[KEY, 2]
        return incoming is not None and incoming.hello["step"] == step

    for step in (11, 12):
        snapshot = put(here.vault.fds()[1][step % 2], rank=2, step=step)
        give = partial(
            transfer.push,
            Held(snapshot, here.vault.fds()[1][step % 2], True),
            "127.0.0.1",
            there.listener.port,
        )
        here.vault._begin(partial(give, SECRET), lambda answer: None)
        pump.until(partial(waiting, step))
    os.kill(taker, signal.SIGCONT)
    pump.until(lambda: (2, 12, False) in there.held())
    pump.until(lambda: quiet(here) and quiet(there))
    assert (2, 11, False) not in there.held(), "only the newest is worth waiting for"


def test_a_buddy_that_is_gone_is_no_harm_and_the_next_copy_is_tried_again(
    nodes: tuple[Node, Node], pump: Pump
) -> None:
    here, there = nodes
    here.order(1, buddy=there)
    port = there.listener.port
    there.leave()
    here.takes(0, 0, step=10)
    pump.until(lambda: quiet(here))
    there.listener = Listener("127.0.0.1", SECRET, port)
    there.reception = Reception(there.listener, pump.watch, pump.unwatch, there.vault.serve)
    here.takes(0, 1, step=20)
    pump.until(lambda: there.held() == [(0, 20, False)])


def test_a_start_waits_for_what_its_ranks_lack(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    snapshot = there.takes(1, 0, rank=3, step=30, size=1_000_000)
    here.order(2, wanted(snapshot, there))
    assert here.started == []
    pump.until(lambda: here.started)
    ((entry),) = here.vault.entries_for(0, 3, PLAIN)
    assert (entry["step"], entry["hash"]) == (30, snapshot.hash)
    memory.verify(here.vault.fds()[0][entry["slot"]], entry)


def test_a_copy_that_is_here_already_goes_into_the_ranks_own_file(
    nodes: tuple[Node, Node], pump: Pump
) -> None:
    """A spare may have been the buddy of the node whose place it takes."""
    here, there = nodes
    there.order(1, buddy=here)
    snapshot = there.takes(0, 0, rank=1, step=5)
    pump.until(lambda: here.held() == [(1, 5, False)])
    there.leave()
    here.order(2, wanted(snapshot, there, local=1))
    pump.until(lambda: here.started)
    assert [e["step"] for e in here.vault.entries_for(1, 1, PLAIN)] == [5]


def test_a_start_goes_on_without_what_cannot_be_had(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    snapshot = there.takes(0, 0, rank=1, step=5)
    gone = Snapshot(1, 6, 1, KEY, snapshot.bytes, "0" * 64)
    here.order(2, wanted(gone, there))
    pump.until(lambda: here.started)
    assert here.vault.entries_for(0, 1, PLAIN) == []
    there.leave()
    here.order(3, wanted(snapshot, there), wanted(snapshot, there, local=1))
    pump.until(lambda: here.started == [2, 3])


def slow_giver(pump: Pump) -> tuple[Listener, Node]:
    """Somebody who takes connections and never answers."""
    listener = Listener("127.0.0.1", SECRET)
    giver = Node.__new__(Node)
    giver.listener = listener
    return listener, giver


def test_a_start_that_was_called_off_does_not_happen(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    snapshot = there.takes(0, 0, rank=1, step=5)
    listener, giver = slow_giver(pump)
    here.order(2, wanted(snapshot, giver))
    here.vault.call_off()
    pump.until(lambda: quiet(here))
    assert here.started == []
    here.order(3)
    assert here.started == [3]
    listener.close()


def test_a_start_waits_until_nothing_of_the_one_before_writes_any_more(
    nodes: tuple[Node, Node], pump: Pump
) -> None:
    """Both want the same file. What the first fetched must neither end up in it nor count for the second."""
    here, there = nodes
    snapshot = there.takes(0, 0, rank=1, step=5)
    listener, giver = slow_giver(pump)
    here.order(2, wanted(snapshot, giver), wanted(snapshot, giver, local=1))
    assert len(here.vault._moving) == 2
    here.order(3, wanted(snapshot, there))
    pump.until(lambda: here.started)
    assert here.started == [3]
    assert [e["step"] for e in here.vault.entries_for(0, 1, PLAIN)] == [5]
    pump.until(lambda: quiet(here))
    assert here.started == [3], "once"
    listener.close()


def test_what_lies_ahead_of_a_new_generation_is_forgotten_and_that_is_told(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    here.takes(0, 0, rank=1, step=20, generation=1)
    here.takes(0, 1, rank=1, step=10, generation=1)
    before = len(here.told)
    here.vault.began(2, 20)
    assert len(here.told) == before, "no news"
    here.vault.began(2, 10)
    assert [e["step"] for e in here.told[-1]["held"]] == [10]


def test_the_named_snapshots_go_to_disk(nodes: tuple[Node, Node], pump: Pump, tmp_path: Path) -> None:
    here, _ = nodes
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    first = here.takes(0, 0, rank=0, step=8)
    gone = Snapshot(1, 8, 1, KEY, first.bytes, first.hash)
    here.told.clear()
    place = str(folder.checkpoints)
    order = {"step": 8, "generation": 2, "place": place, "read_back": True}
    here.vault.flush({**order, "snapshots": [first.summary(), gone.summary()]})
    parts = lambda: {m["part"]["rank"]: m["part"] for m in here.told if "part" in m}  # noqa: E731
    pump.until(lambda: len(parts()) == 2)
    missing = {"rank": 1, "step": 8, "place": place, "ok": False, "message": "it is not here any more"}
    assert parts()[1] == missing
    # Its index came with the snapshot; the summary that travels with the order has none.
    assert (parts()[0]["ok"], parts()[0]["step"]) == (True, 8)
    written = folder.checkpoints / "step-00000008.tmp-2-memory"
    assert sorted(p.name for p in written.iterdir()) == ["index-00000.json", "rank-00000.safetensors"]


def test_without_a_process_to_be_had_the_run_goes_on(
    nodes: tuple[Node, Node], pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = nodes
    here.order(1, buddy=there)

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(process, "fork", refuse)
        snapshot = here.takes(0, 0, rank=1, step=5)
        there.order(2, wanted(snapshot, here))
        assert there.started == [2]
    here.takes(0, 1, rank=1, step=10)
    pump.until(lambda: (1, 10, False) in there.held())


def test_nonsense_from_a_rank_is_said_to_be_so(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    with pytest.raises(ValueError, match="a snapshot without"):
        here.vault.took(0, {"slot": 0})
    with pytest.raises(ValueError, match="in file"):
        here.vault.took(0, {**put(here.vault.fds()[0][0]).to_message(), "slot": 2})


def test_a_greeting_that_is_no_snapshot_is_shown_out(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, _ = nodes
    outgoing = Outgoing("127.0.0.1", here.listener.port, SECRET, {"role": "fetch", "rank": "x"})
    states: list[str] = []
    pump.ticks.append(lambda: states.append(outgoing.advance()) if "ready" not in states else None)
    pump.until(lambda: "ready" in states)
    link = outgoing.link()
    pump.until(lambda: link.receive() == [] and link.closed)
    link.close()
    assert quiet(here)
