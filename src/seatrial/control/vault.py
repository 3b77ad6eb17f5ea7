"""The RAM tier as one agent has it: what its ranks put into memory is held, copied to another node, and given out."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from seatrial.base import process
from seatrial.checkpoint.memory import Snapshot
from seatrial.control import transfer
from seatrial.control.keeper import Held, Keeper
from seatrial.control.spec import AgentSpec
from seatrial.control.transfer import Moving
from seatrial.control.wire import Incoming


class Vault:
    """Every transfer is a child process; this object knows what each was for."""

    def __init__(self, spec: AgentSpec, tell: Callable[[dict[str, Any]], None]) -> None:
        self._spec = spec
        self._tell = tell
        self._secret = b""
        self._keeper = Keeper(spec.ranks_per_node)
        self._moving: dict[int, tuple[Moving, Callable[[dict[str, Any]], None]]] = {}  # by the child's pid
        self._buddy: dict[str, Any] | None = None
        self._pushing: dict[int, Held | None] = {}  # local -> what came meanwhile and is to be copied next
        # Layout and rank of each copy that comes -> the next one, which its giver has sent before we knew of the end of
        # this one.
        self._receiving: dict[tuple[str, int], Incoming | None] = {}
        # The start that waits: what is still to be asked for, and what to call when all that was asked for is there.
        self._next: tuple[list[dict[str, Any]], Callable[[], None]] | None = None
        self._fetching: set[int] = set()  # pids that fill the files of our own ranks

    def transfers(self) -> dict[int, str]:
        """The running transfers: name by pid."""
        return {pid: f"snapshot transfer ({moving.what})" for pid, (moving, _) in self._moving.items()}

    def fds(self) -> dict[int, tuple[int, int]]:
        """The memory files that ranks inherit, by local number."""
        return {local: self._keeper.fds(local) for local in range(self._spec.ranks_per_node)}

    def unlock(self, secret: bytes) -> None:
        """The run's secret, which transfers prove themselves with."""
        self._secret = secret

    def held(self) -> list[dict[str, Any]]:
        """What is here, for the coordinator."""
        return self._keeper.held()

    def entries_for(self, local: int, rank: int, layout: dict[str, Any]) -> list[dict[str, Any]]:
        """A leg's "snapshots"."""
        return self._keeper.entries_for(local, rank, layout)

    def began(self, generation: int, step: int) -> None:
        """`generation` has gone on after `step`: what an earlier one did beyond it counts no more."""
        before = self._keeper.held()
        self._keeper.began(generation, step)
        if self._keeper.held() != before:
            self._tell_held()

    def forget(self, generation: int, step: int) -> None:
        """`generation` itself went back to `step`: what it had copied of later steps counts no more, what it will does."""
        before = self._keeper.held()
        self._keeper.forget(generation, step)
        if self._keeper.held() != before:
            self._tell_held()

    # -- from our own ranks, and on to the buddy

    def took(self, local: int, message: dict[str, Any]) -> None:
        """A rank has filled one of its files. ValueError if it says it wrongly."""
        snapshot = self._keeper.took(local, message)
        self._tell_held()
        held = self._keeper.find(snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout)
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
            lambda: transfer.push(held, buddy["address"], buddy["port"], self._secret),
            lambda answer: self._pushed(local),
        )

    def _pushed(self, local: int) -> None:
        # A copy that failed is tried again with the next snapshot; that a node is gone is found out elsewhere.
        following = self._pushing.pop(local)
        if following is not None:
            self._push(local, following)

    # -- for others

    def serve(self, incoming: Incoming) -> None:
        """Another agent brings a copy, or asks for one."""
        try:
            snapshot = Snapshot.from_message(incoming.hello)
        except ValueError:
            incoming.close()
            return
        if incoming.hello["role"] == "fetch":
            held = self._keeper.find(snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout)
            self._begin(lambda: transfer.serve(incoming, held), lambda answer: incoming.close())
            return
        self._receive(incoming, snapshot)

    def _receive(self, incoming: Incoming, snapshot: Snapshot) -> None:
        key = (snapshot.layout, snapshot.rank)
        if key in self._receiving:
            older, self._receiving[key] = self._receiving[key], incoming
            if older is not None:
                older.close()
            return
        fd = self._keeper.room(snapshot)
        if fd is None:
            incoming.close()
            return

        def received(answer: dict[str, Any]) -> None:
            incoming.close()  # it is closed already, unless the child could not be started
            self._filled(fd, answer)
            following = self._receiving.pop(key)
            if following is not None:
                self.serve(following)

        self._receiving[key] = None
        self._begin(lambda: transfer.receive(incoming, fd), received)

    def _filled(self, fd: int, answer: dict[str, Any]) -> None:
        self._keeper.filled(fd, Snapshot.from_message(answer["snapshot"]) if answer["ok"] else None)
        self._tell_held()

    # -- a generation

    def guard(self, order: dict[str, Any], then: Callable[[], None]) -> None:
        """Get what the ranks of this start need and do not find here; then call `then`, whether or not it came.

        A start before it that still waits is called off.
        """
        self._buddy = order["buddy"]
        self._keeper.guard(order["guards"], order["layout"])
        self._tell_held()
        self.call_off()
        self._next = (list(order["fetch"]), then)
        self._go_on()

    def call_off(self) -> None:
        """The start that waits will not be."""
        self._next = None
        for pid in self._fetching:
            process.signal_group(pid, signal.SIGKILL)

    def _go_on(self) -> None:
        # What an earlier start fetched must not be written any more when the ranks of this one use the files.
        while self._next is not None and not self._fetching:
            wanted, then = self._next
            if not wanted:
                self._next = None
                return then()
            self._next = ([], then)
            for one in wanted:
                self._fetch(one)

    def _fetch(self, wanted: dict[str, Any]) -> None:
        snapshot = Snapshot.from_message(wanted["snapshot"])
        fd = self._keeper.room(snapshot, wanted["local"])
        if fd is None:
            return
        here = self._keeper.find(snapshot.rank, snapshot.step, snapshot.generation, snapshot.layout)
        source = wanted["from"]

        def start() -> Moving:
            if here is not None:
                return transfer.copy(here, fd)
            return transfer.fetch(snapshot, fd, source["address"], source["port"], self._secret)

        moving = self._begin(start, lambda answer: self._filled(fd, answer))
        if moving is not None:
            self._fetching.add(moving.pid)

    def flush(self, order: dict[str, Any]) -> None:
        """Write the named snapshots into the checkpoint that all nodes write to."""
        place, generation, read_back = order["place"], order["generation"], order["read_back"]
        for values in order["snapshots"]:
            wanted = Snapshot.from_message(values)
            held = self._keeper.find(wanted.rank, wanted.step, wanted.generation, wanted.layout)
            replica = values.get("replica")
            rank = wanted.rank if replica is None else replica[0]
            part = {"rank": rank, "step": wanted.step, "place": place}
            if held is None:
                self._tell({"part": {**part, "ok": False, "message": "it is not here any more"}})
                continue
            write = partial(transfer.flush, held, place, generation, replica=replica, read_back=read_back)
            self._begin(write, partial(self._tell_part, part))

    def _tell_part(self, part: dict[str, Any], answer: dict[str, Any]) -> None:
        self._tell({"part": {**answer, **part}})

    # -- children

    def _begin(self, start: Callable[[], Moving], then: Callable[[dict[str, Any]], None]) -> Moving | None:
        """Start a transfer and call `then` with what it came to; None if not even a process could be had for it."""
        try:
            moving = start()
        except OSError as error:
            then({"ok": False, "message": str(error), "seconds": 0.0})
            return None
        self._moving[moving.pid] = (moving, then)
        return moving

    def reaped(self, pid: int, status: int) -> bool:
        """A child of the agent has ended; whether it was one of ours."""
        if pid not in self._moving:
            return False
        moving, then = self._moving.pop(pid)
        self._fetching.discard(pid)
        then(moving.result())
        self._go_on()
        return True

    def _tell_held(self) -> None:
        self._tell({"held": self._keeper.held()})
