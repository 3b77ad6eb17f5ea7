"""Snapshot transfers between nodes and to disk, each in a forked process with blocking sockets and files.

The agent's loop never blocks: it forks, continues, and calls `Moving.result` when it has reaped the child. Between
nodes, after the wire's handshake (its hello is `GivesSnapshot` or `WantsSnapshot`):

    sender  `SnapshotHeader`, then that many raw bytes          receiver   `SnapshotTaken`

The bytes are checked against their hash, which is sent in a signed message: it detects any accidental corruption, but
not an attacker on the network who forges data to match. Until all bytes have arrived and match, the receiving file is
marked as empty.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.base import process
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint import memory
from seatrial.checkpoint.commit import fence, for_replica, new_manifest, progress_after
from seatrial.checkpoint.manifest import Damaged, folder_name
from seatrial.checkpoint.memory import Snapshot
from seatrial.checkpoint.place import open_place
from seatrial.control.net import wire
from seatrial.control.snapshots.snapshot_buffers import Held
from seatrial.job.layout import Layout
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import frozen, job_of

TIMEOUT_S = 20.0  # without a byte: then the other side counts as unreachable
_BACKGROUND = 10  # niceness of transfers that only secure a state: training has priority on the cores
_BUFFER_BYTES = 1 << 20
# Timeouts for storage progress; then the child ends by SIGALRM, which works even on a hung mount. Looking lists a
# folder. Writing resets the timeout for each chunk, and must leave time for the fallback (`flush_wait_s`).
_LOOK_S, _WRITE_S = 5, 25

Answer = dict[str, Any]


@dataclass
class Moving:
    """A transfer in progress in a child process."""

    pid: int
    what: str  # "push", "receive", "fetch", "serve", "copy", "look", "part", "publish"
    fd: int | None  # the memory file that is being filled
    _answer: int

    def result(self) -> Answer:
        """The result, once the child has been reaped; call it once.

        {"ok": bool, "message": str, "seconds": float}; where `fd` was filled also "snapshot" (`Snapshot.to_message`).
        """
        size = os.fstat(self._answer).st_size
        text = os.pread(self._answer, size, 0)
        os.close(self._answer)
        try:
            answer: Answer = json.loads(text)
        except ValueError:  # it was killed before it could write a complete answer
            return {"ok": False, "message": f"the process for this {self.what} was killed", "seconds": 0.0}
        return answer


def push(held: Held, address: str, port: int, secret: bytes) -> Moving:
    """Send a copy of `held` to the agent that listens at `address`:`port`."""
    hello = msg.encode(msg.GivesSnapshot(**held.snapshot.summary()))

    def body() -> Answer:
        session = wire.dial(address, port, secret, hello, TIMEOUT_S)
        _send_snapshot(session, held)
        return {}

    return _start("push", body, keep=[held.fd], niceness=_BACKGROUND)


def receive(incoming: wire.Incoming, fd: int, expected: Snapshot) -> Moving:
    """Receive the `push` of `expected` into the memory file `fd`. `incoming` is "ready"; here it is closed."""

    def body() -> Answer:
        return {"snapshot": _receive_snapshot(incoming.session(TIMEOUT_S), fd, expected).to_message()}

    moving = _start("receive", body, keep=[fd, incoming.fileno()], fd=fd, niceness=_BACKGROUND)
    incoming.close()
    return moving


def fetch(wanted: Snapshot, fd: int, address: str, port: int, secret: bytes) -> Moving:
    """Fetch `wanted` (its `summary` suffices) from the agent at `address`:`port` into the memory file `fd`."""
    hello = msg.encode(msg.WantsSnapshot(**wanted.summary()))

    def body() -> Answer:
        session = wire.dial(address, port, secret, hello, TIMEOUT_S)
        return {"snapshot": _receive_snapshot(session, fd, wanted).to_message()}

    return _start("fetch", body, keep=[fd], fd=fd)


def serve(incoming: wire.Incoming, held: Held | None) -> Moving:
    """Answer a `fetch` with `held`, which `SnapshotBuffers.find` found for its hello. `incoming` is closed here."""

    def body() -> Answer:
        _send_snapshot(incoming.session(TIMEOUT_S), held)
        return {}

    keep = [incoming.fileno(), *([] if held is None else [held.fd])]
    moving = _start("serve", body, keep=keep)
    incoming.close()
    return moving


def copy(held: Held, fd: int) -> Moving:
    """Copy `held` into another memory file of this node."""

    def body() -> Answer:
        filling = memory.Filling(fd, held.snapshot.bytes)
        for part in memory.chunks(held.fd, held.snapshot.bytes):
            filling.add(part)
        filling.finish(held.snapshot.hash)
        return {"snapshot": held.snapshot.to_message()}

    return _start("copy", body, keep=[held.fd, fd], fd=fd)


# What agents write of a generation is kept apart from what its ranks write, whose partial writes must not get in.
FROM_MEMORY = "memory"


def look(places: Sequence[str]) -> Moving:
    """Find the newest complete checkpoint: {"step"}, 0 where there is none in any of `places`.

    Never in the agent's own loop, not even for a local folder: a hung mount would block it, and all ranks with it.
    """

    def body() -> Answer:
        return {"step": max((step for url in places for step in open_place(url).steps()), default=0)}

    return _start("look", body, keep=[], silent_s=_LOOK_S)


def flush(
    held: Held, place: str, generation: int, *, replica: tuple[int, bool] | None = None, read_back: bool
) -> Moving:
    """Write `held` as its rank's part of the checkpoint of generation `generation` at `place`.

    `replica`: write it as the part of another rank with the same state, and whether that rank owns it (`for_replica`).
    """
    snapshot = held.snapshot
    rank, index = snapshot.rank, snapshot.index
    if replica is not None:
        rank, owns = replica
        index = for_replica(index, owns=owns)

    def body() -> Answer:
        open_place(place).put_part(
            snapshot.step,
            generation,
            rank,
            held.fd,
            snapshot.bytes,
            index,
            read_back,
            origin=FROM_MEMORY,
            expected=snapshot.hash,
            beat=lambda _done: _alive(_WRITE_S),
        )
        return {}

    return _start("part", body, keep=[held.fd], silent_s=_WRITE_S)


def publish(
    folder: RunFolder, place: str, layout: Layout, step: int, *, generation: int, trained_by: int
) -> Moving:
    """Make what `flush` wrote to `place` for all ranks of `layout` a complete checkpoint of `step`.

    `generation` publishes it, and must be the last one started; `trained_by` is the snapshots' own. An undamaged
    manifest of the same step that already exists is accepted instead.
    """

    def body() -> Answer:
        at = open_place(place)
        if step in at.steps():
            at.manifest(step)
            return {"message": f"{folder_name(step)} existed already"}
        job = job_of(folder, frozen(folder))
        manifest = new_manifest(job, layout, progress_after(job, step, trained_by))
        check = fence(folder, generation)
        at.commit(step, generation, manifest, layout.world_size, check, origin=FROM_MEMORY)
        return {}

    return _start("publish", body, keep=[], silent_s=_WRITE_S)


def _alive(silent_s: int) -> None:
    """In a child: restart the timeout, so that it may be silent for that long from now on."""
    signal.alarm(silent_s)


def _send_snapshot(session: wire.BlockingLink, held: Held | None) -> None:
    """Send a snapshot and wait until the other side has verified it."""
    if held is None:
        session.send(msg.encode(msg.SnapshotHeader(None)))
        return
    session.send(msg.encode(msg.SnapshotHeader(held.snapshot.to_message())))
    size = held.snapshot.bytes
    with os.fdopen(held.fd, "rb", buffering=0, closefd=False) as file:
        sent = session.sock.sendfile(file, 0, size)
    if sent != size:
        raise Damaged(f"the memory file has {sent} bytes, not {size}")
    msg.decode(session.receive(), msg.FromTaker)


def _receive_snapshot(session: wire.BlockingLink, fd: int, expected: Snapshot) -> Snapshot:
    """The opposite of `_send_snapshot`: fill `fd`; returns the snapshot with its index."""
    header: msg.FromGiver = msg.decode(session.receive(), msg.FromGiver)
    if header.snapshot is None:
        raise Damaged(f"the other side does not have step {expected.step} of rank {expected.rank}")
    snapshot = Snapshot.from_message(header.snapshot)
    if snapshot != expected:  # the index is not compared
        raise Damaged(f"the other side has {snapshot}, requested was {expected}")
    filling = memory.Filling(fd, snapshot.bytes)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    left = snapshot.bytes
    while left:
        n = session.sock.recv_into(buffer[: min(left, len(buffer))])
        if n == 0:
            raise Damaged(f"the stream ended {left} bytes early")
        filling.add(buffer[:n])
        left -= n
    filling.finish(snapshot.hash)
    session.send(msg.encode(msg.SnapshotTaken()))
    return snapshot


def _start(
    what: str,
    body: Callable[[], Answer],
    *,
    keep: Collection[int],
    fd: int | None = None,
    niceness: int = 0,
    silent_s: int = 0,
) -> Moving:
    """Fork a child for `body`. `silent_s`: it ends after this many seconds without `_alive`; 0: no timeout."""
    answer = os.memfd_create(f"seatrial-{what}")

    def child() -> int:
        if silent_s:
            message = f"the storage did not answer for {silent_s} s"
            os.pwrite(answer, json.dumps({"ok": False, "message": message, "seconds": silent_s}).encode(), 0)
            _alive(silent_s)
        _close_all_but({0, 1, 2, answer, *keep})
        if niceness:
            os.nice(niceness)
        begin = time.monotonic()
        try:
            values: Answer = {"ok": True, "message": "", **body()}
        except (OSError, ValueError, KeyError, TypeError, SeatrialError) as error:
            values = {"ok": False, "message": str(error)}
        _alive(0)
        values["seconds"] = time.monotonic() - begin
        data = json.dumps(values).encode()
        os.ftruncate(answer, 0)
        while data:
            data = data[os.write(answer, data) :]
        return 0 if values["ok"] else 1

    return Moving(process.fork(child), what, fd, answer)


def _close_all_but(keep: set[int]) -> None:
    """Close every other file: a connection that the agent closes must not stay open in a child."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                continue
