"""One agent's part of the RAM tier: holds its ranks' snapshots, copies them to another node, and serves them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from seatrial.base import process
from seatrial.checkpoint.memory import Snapshot
from seatrial.control.net.wire import Incoming
from seatrial.control.node.spec import AgentSpec
from seatrial.control.snapshots import transfer
from seatrial.control.snapshots.snapshot_buffers import Held, SnapshotBuffers
from seatrial.control.snapshots.transfer import Moving
from seatrial.record import messages as msg


class SnapshotService:
    """The snapshots of one agent. Every transfer is a child process; this object tracks the purpose of each."""

    def __init__(self, spec: AgentSpec, send: Callable[[msg.FromAgent], None]) -> None:
        self._spec = spec
        self._send = send
        self._secret = b""
        self._snapshot_buffers = SnapshotBuffers(spec.ranks_per_node)
        self._moving: dict[int, tuple[Moving, Callable[[dict[str, Any]], None]]] = {}  # by the child's pid
        self._buddy: msg.AgentAddress | None = None
        self._pushing: dict[int, Held | None] = {}  # local -> newer snapshot, to be copied next
        # Layout and rank of each copy being received -> the next copy, if its sender connected before we had noticed
        # that this one is complete.
        self._receiving: dict[tuple[str, int], tuple[Incoming, Snapshot] | None] = {}
        # The waiting start: what has yet to be requested, and what to call when all requests are done.
        self._next: tuple[list[msg.Fetch], Callable[[], None]] | None = None
        self._fetching: set[int] = set()  # pids that fill the files of our own ranks

    def transfers(self) -> dict[int, str]:
        """The running transfers: name by pid."""
        return {pid: f"snapshot transfer ({moving.what})" for pid, (moving, _) in self._moving.items()}

    def fds(self) -> dict[int, tuple[int, int]]:
        """The memory files that ranks inherit, by local number."""
        return {local: self._snapshot_buffers.fds(local) for local in range(self._spec.ranks_per_node)}

    def set_secret(self, secret: bytes) -> None:
        """Set the run's secret, with which transfers authenticate."""
        self._secret = secret

    def held(self) -> list[dict[str, Any]]:
        """The snapshots held here, for the coordinator."""
        return self._snapshot_buffers.held()

    def entries_for(self, local: int, rank: int, layout: dict[str, Any]) -> list[dict[str, Any]]:
        """A generation spec's "snapshots"."""
        return self._snapshot_buffers.entries_for(local, rank, layout)

    def generation_started(self, generation: int, step: int) -> None:
        """`generation` resumed after `step`: later snapshots of earlier generations are no longer valid."""
        before = self._snapshot_buffers.held()
        self._snapshot_buffers.generation_started(generation, step)
        if self._snapshot_buffers.held() != before:
            self._report_held()

    def forget(self, generation: int, step: int) -> None:
        """`generation` itself rolled back to `step`: its copies of later steps so far are invalid, new ones are not."""
        before = self._snapshot_buffers.held()
        self._snapshot_buffers.forget(generation, step)
        if self._snapshot_buffers.held() != before:
            self._report_held()

    # -- from our own ranks, and to the buddy node

    def rank_filled(self, local: int, message: msg.SnapshotFilled) -> None:
        """Handle a rank's message that it filled one of its files. Raises ValueError if the message is invalid."""
        snapshot = self._snapshot_buffers.rank_filled(local, message)
        self._report_held()
        held = self._snapshot_buffers.find(snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout)
        if held is not None and self._buddy is not None:
            if local in self._pushing:
                self._pushing[local] = held  # only the newest is worth sending
            else:
                self._push(local, held)

    def _push(self, local: int, held: Held) -> None:
        buddy = self._buddy
        if buddy is None:
            return
        self._pushing[local] = None
        self._begin(
            lambda: transfer.push(held, buddy.address, buddy.port, self._secret),
            lambda answer: self._pushed(local),
        )

    def _pushed(self, local: int) -> None:
        # After a failed copy the next snapshot is tried; the loss of a node is detected elsewhere.
        following = self._pushing.pop(local)
        if following is not None:
            self._push(local, following)

    # -- for other agents

    def serve(self, incoming: Incoming, hello: msg.GivesSnapshot | msg.WantsSnapshot) -> None:
        """Serve another agent that sends a copy, or requests one."""
        try:
            snapshot = Snapshot.from_message(vars(hello))
        except ValueError:
            incoming.close()
            return
        if isinstance(hello, msg.WantsSnapshot):
            held = self._snapshot_buffers.find(
                snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout
            )
            self._begin(lambda: transfer.serve(incoming, held), lambda answer: incoming.close())
            return
        self._receive(incoming, snapshot)

    def _receive(self, incoming: Incoming, snapshot: Snapshot) -> None:
        key = (snapshot.layout, snapshot.rank)
        if key in self._receiving:
            older, self._receiving[key] = self._receiving[key], (incoming, snapshot)
            if older is not None:
                older[0].close()
            return
        fd = self._snapshot_buffers.buffer_for(snapshot)
        if fd is None:
            incoming.close()
            return

        def received(answer: dict[str, Any]) -> None:
            incoming.close()  # already closed, unless the child could not be started
            self._filled(fd, answer)
            following = self._receiving.pop(key)
            if following is not None:
                self._receive(*following)

        self._receiving[key] = None
        self._begin(lambda: transfer.receive(incoming, fd, snapshot), received)

    def _filled(self, fd: int, answer: dict[str, Any]) -> None:
        self._snapshot_buffers.filled(fd, Snapshot.from_message(answer["snapshot"]) if answer["ok"] else None)
        self._report_held()

    # -- a generation

    def guard(self, order: msg.Start, then: Callable[[], None]) -> None:
        """Fetch what the ranks of this start need and lack here; then call `then`, whether or not it succeeded.

        An earlier start that still waits is cancelled.
        """
        self._buddy = order.buddy
        self._snapshot_buffers.guard(order.guards, order.layout)
        self._report_held()
        self.cancel_start()
        self._next = (order.fetch, then)
        self._continue_start()

    def cancel_start(self) -> None:
        """Cancel the start that waits."""
        self._next = None
        for pid in self._fetching:
            process.signal_group(pid, signal.SIGKILL)

    def _continue_start(self) -> None:
        # Fetches of an earlier start must have stopped writing before the ranks of this one use the files.
        while self._next is not None and not self._fetching:
            wanted, then = self._next
            if not wanted:
                self._next = None
                return then()
            self._next = ([], then)
            for one in wanted:
                self._fetch(one)

    def _fetch(self, wanted: msg.Fetch) -> None:
        snapshot = Snapshot.from_message(wanted.snapshot)
        fd = self._snapshot_buffers.buffer_for(snapshot, wanted.local)
        if fd is None:
            return
        here = self._snapshot_buffers.find(snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout)

        def start() -> Moving:
            if here is not None:
                return transfer.copy(here, fd)
            return transfer.fetch(snapshot, fd, wanted.source.address, wanted.source.port, self._secret)

        moving = self._begin(start, lambda answer: self._filled(fd, answer))
        if moving is not None:
            self._fetching.add(moving.pid)

    def flush(self, order: msg.Flush) -> None:
        """Write the named snapshots to the checkpoint that all nodes write to."""
        for values in order.snapshots:
            wanted = Snapshot.from_message(values)
            held = self._snapshot_buffers.find(wanted.rank, wanted.step, wanted.generation, wanted.layout)
            replica = values.get("replica")
            rank = wanted.rank if replica is None else replica[0]
            then = partial(self._report_part, rank, wanted.step, order.place)
            if held is None:
                then({"ok": False, "message": "this node no longer has it"})
                continue
            write = partial(
                transfer.flush,
                held,
                order.place,
                order.generation,
                replica=replica,
                read_back=order.read_back,
            )
            self._begin(write, then)

    def _report_part(self, rank: int, step: int, place: str, answer: dict[str, Any]) -> None:
        self._send(msg.Part(rank, step, place, answer["ok"], answer["message"]))

    # -- children

    def _begin(self, start: Callable[[], Moving], then: Callable[[dict[str, Any]], None]) -> Moving | None:
        """Start a transfer and call `then` with its result; None if no process could be forked for it."""
        try:
            moving = start()
        except OSError as error:
            then({"ok": False, "message": str(error), "seconds": 0.0})
            return None
        self._moving[moving.pid] = (moving, then)
        return moving

    def reaped(self, pid: int, status: int) -> bool:
        """Handle the exit of a child of the agent; return whether it was one of ours."""
        if pid not in self._moving:
            return False
        moving, then = self._moving.pop(pid)
        self._fetching.discard(pid)
        then(moving.result())
        self._continue_start()
        return True

    def _report_held(self) -> None:
        self._send(msg.HeldSnapshots(self._snapshot_buffers.held()))
