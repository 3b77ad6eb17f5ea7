"""Snapshots of one node: copied to the buddy, fetched before a start, written to disk; and never in the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from memory_files import KEY, LAYOUT, filled, put
from wired import SECRET, Pump

from seatrial.base import process
from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Snapshot
from seatrial.control.net.acceptor import Acceptor
from seatrial.control.net.wire import Incoming, Listener, Outgoing
from seatrial.control.node.spec import AgentSpec
from seatrial.control.snapshots import transfer
from seatrial.control.snapshots.snapshot_buffers import Held
from seatrial.control.snapshots.snapshot_service import SnapshotService
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder

PLAIN = LAYOUT.as_dict()


class Node:
    """A snapshot service behind a door of its own."""

    def __init__(self, pump: Pump, folder: Path, number: int) -> None:
        spec = AgentSpec(
            run=folder,
            generation=1,
            node=number,
            nodes=2,
            ranks_per_node=2,
            device="cpu",
        )
        self.told: list[msg.FromAgent] = []
        self.snapshot_service = SnapshotService(spec, self.told.append)
        self.snapshot_service.set_secret(SECRET)
        self.pump = pump
        self.listener = Listener("127.0.0.1", SECRET)
        self.acceptor = Acceptor(self.listener, pump.watch, pump.unwatch, self.serve)
        self.started: list[int] = []

    def serve(self, incoming: Incoming) -> None:
        self.snapshot_service.serve(incoming, msg.decode(incoming.hello, msg.Hello))

    @property
    def where(self) -> msg.AgentAddress:
        return msg.AgentAddress(0, "127.0.0.1", self.listener.port)

    def takes(self, local: int, slot: int, **what: Any) -> Snapshot:
        """A rank of `local` fills one of its files and says so."""
        snapshot = put(self.snapshot_service.fds()[local][slot], **what)
        self.snapshot_service.rank_filled(local, filled(snapshot, slot))
        return snapshot

    def order(self, generation: int, *fetch: msg.Fetch, buddy: Node | None = None) -> None:
        """A start, after which `started` has its generation."""
        order = msg.Start(
            generation=generation,
            slot=0,
            slots=2,
            ranks=[0, 1],
            world_size=4,
            layout=PLAIN,
            master_addr="127.0.0.1",
            master_port=1,
            in_place=False,
            again=False,
            inputs={},
            buddy=None if buddy is None else buddy.where,
            guards=[0, 1, 2, 3],
            fetch=list(fetch),
        )
        self.snapshot_service.guard(order, lambda: self.started.append(generation))

    def reported(self) -> list[dict[str, Any]]:
        """What it last said that it holds."""
        last = self.told[-1]
        assert isinstance(last, msg.HeldSnapshots)
        return last.snapshots

    def held(self) -> list[tuple[int, int, bool]]:
        """(rank, step, own) of everything here."""
        return sorted((e["rank"], e["step"], e["own"]) for e in self.snapshot_service.held())

    def leave(self) -> None:
        """As if its process had ended."""
        self.pump.unwatch(self.listener)
        self.listener.close()


def wanted(snapshot: Snapshot, giver: Node, local: int = 0) -> msg.Fetch:
    return msg.Fetch(local, snapshot.summary(), giver.where)


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def nodes(pump: Pump, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    before = process.descendants(os.getpid())  # services that other tests use
    both = Node(pump, tmp_path, 0), Node(pump, tmp_path, 1)

    def reaped(pid: int, status: int) -> None:
        assert any(node.snapshot_service.reaped(pid, status) for node in both)

    pump.ticks.append(lambda: process.reap(reaped))
    yield both
    process.kill_all(lambda: process.descendants(os.getpid()) - before)
    process.reap(lambda pid, status: None)
    pump.close()
    for node in both:
        node.snapshot_service._snapshot_buffers.close()


def quiet(node: Node) -> bool:
    return not node.snapshot_service._moving


def test_a_snapshot_is_reported_and_copied_to_the_buddy(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    here.order(1, buddy=there)
    assert here.started == [1], "nothing to wait for"
    snapshot = here.takes(0, 0, rank=2, step=10)
    assert here.reported()[0]["step"] == 10
    pump.until(lambda: there.held())
    assert there.held() == [(2, 10, False)]
    (held,) = there.reported()
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
    pump.until(lambda: there.snapshot_service._receiving)
    (taker,) = there.snapshot_service._moving
    os.kill(taker, signal.SIGSTOP)

    def waiting(step: int) -> bool:
        following = there.snapshot_service._receiving[KEY, 2]
        return following is not None and following[1].step == step

    for step in (11, 12):
        snapshot = put(here.snapshot_service.fds()[1][step % 2], rank=2, step=step)
        give = partial(
            transfer.push,
            Held(snapshot, here.snapshot_service.fds()[1][step % 2], True),
            "127.0.0.1",
            there.listener.port,
        )
        here.snapshot_service._begin(partial(give, SECRET), lambda answer: None)
        pump.until(partial(waiting, step))
    os.kill(taker, signal.SIGCONT)
    pump.until(lambda: (2, 12, False) in there.held())
    pump.until(lambda: quiet(here) and quiet(there))
    assert (2, 11, False) not in there.held(), "only the newest is worth waiting for"


def test_unreachable_buddy_is_tolerated_and_next_copy_retried(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    here.order(1, buddy=there)
    port = there.listener.port
    there.leave()
    here.takes(0, 0, step=10)
    pump.until(lambda: quiet(here))
    there.listener = Listener("127.0.0.1", SECRET, port)
    there.acceptor = Acceptor(there.listener, pump.watch, pump.unwatch, there.serve)
    here.takes(0, 1, step=20)
    pump.until(lambda: there.held() == [(0, 20, False)])


def test_a_start_waits_for_what_its_ranks_lack(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    snapshot = there.takes(1, 0, rank=3, step=30, size=1_000_000)
    here.order(2, wanted(snapshot, there))
    assert here.started == []
    pump.until(lambda: here.started)
    ((entry),) = here.snapshot_service.entries_for(0, 3, PLAIN)
    assert (entry["step"], entry["hash"]) == (30, snapshot.hash)
    memory.verify(here.snapshot_service.fds()[0][entry["slot"]], entry)


def test_local_buddy_copy_becomes_the_ranks_own_snapshot(nodes: tuple[Node, Node], pump: Pump) -> None:
    """A spare may have been the buddy of the node whose place it takes."""
    here, there = nodes
    there.order(1, buddy=here)
    snapshot = there.takes(0, 0, rank=1, step=5)
    pump.until(lambda: here.held() == [(1, 5, False)])
    there.leave()
    here.order(2, wanted(snapshot, there, local=1))
    pump.until(lambda: here.started)
    assert [e["step"] for e in here.snapshot_service.entries_for(1, 1, PLAIN)] == [5]


def test_a_start_goes_on_without_what_cannot_be_had(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, there = nodes
    snapshot = there.takes(0, 0, rank=1, step=5)
    gone = Snapshot(1, 6, 1, KEY, snapshot.bytes, "0" * 64)
    here.order(2, wanted(gone, there))
    pump.until(lambda: here.started)
    assert here.snapshot_service.entries_for(0, 1, PLAIN) == []
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
    here.snapshot_service.cancel_start()
    pump.until(lambda: quiet(here))
    assert here.started == []
    here.order(3)
    assert here.started == [3]
    listener.close()


def test_start_waits_for_transfers_of_the_previous_start_to_end(nodes: tuple[Node, Node], pump: Pump) -> None:
    """Both want the same file. What the first fetched must neither end up in it nor count for the second."""
    here, there = nodes
    snapshot = there.takes(0, 0, rank=1, step=5)
    listener, giver = slow_giver(pump)
    here.order(2, wanted(snapshot, giver), wanted(snapshot, giver, local=1))
    assert len(here.snapshot_service._moving) == 2
    here.order(3, wanted(snapshot, there))
    pump.until(lambda: here.started)
    assert here.started == [3]
    assert [e["step"] for e in here.snapshot_service.entries_for(0, 1, PLAIN)] == [5]
    pump.until(lambda: quiet(here))
    assert here.started == [3], "once"
    listener.close()


def test_snapshots_ahead_of_new_generation_are_forgotten(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    here.takes(0, 0, rank=1, step=20, generation=1)
    here.takes(0, 1, rank=1, step=10, generation=1)
    before = len(here.told)
    here.snapshot_service.generation_started(2, 20)
    assert len(here.told) == before, "no news"
    here.snapshot_service.generation_started(2, 10)
    assert [e["step"] for e in here.reported()] == [10]


def test_the_named_snapshots_go_to_disk(nodes: tuple[Node, Node], pump: Pump, tmp_path: Path) -> None:
    here, _ = nodes
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    first = here.takes(0, 0, rank=0, step=8)
    gone = Snapshot(1, 8, 1, KEY, first.bytes, first.hash)
    here.told.clear()
    place = str(folder.checkpoints)
    here.snapshot_service.flush(msg.Flush(8, 2, [first.summary(), gone.summary()], place, read_back=True))
    parts = lambda: {m.rank: m for m in here.told if isinstance(m, msg.Part)}  # noqa: E731
    pump.until(lambda: len(parts()) == 2)
    assert parts()[1] == msg.Part(1, 8, place, ok=False, message="this node no longer has it")
    # Its index came with the snapshot; the summary that travels with the order has none.
    assert (parts()[0].ok, parts()[0].step) == (True, 8)
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


def test_an_invalid_snapshot_message_of_a_rank_is_refused(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    snapshot = put(here.snapshot_service.fds()[0][0])
    with pytest.raises(ValueError, match="not a snapshot"):
        here.snapshot_service.rank_filled(0, filled(replace(snapshot, step=-1), 0))
    with pytest.raises(ValueError, match="in file"):
        here.snapshot_service.rank_filled(0, filled(snapshot, 2))


def test_a_hello_without_a_valid_snapshot_is_refused(nodes: tuple[Node, Node], pump: Pump) -> None:
    here, _ = nodes
    hello = msg.encode(msg.WantsSnapshot(-1, 8, 1, KEY, 9, "x"))
    outgoing = Outgoing("127.0.0.1", here.listener.port, SECRET, hello)
    states: list[str] = []
    pump.ticks.append(lambda: states.append(outgoing.advance()) if "ready" not in states else None)
    pump.until(lambda: "ready" in states)
    link = outgoing.link()
    pump.until(lambda: link.receive() == [] and link.closed)
    link.close()
    assert quiet(here)
