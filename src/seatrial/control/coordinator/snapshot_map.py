"""The coordinator's map of which node holds whose snapshots: what each node must fetch, and what goes to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from seatrial.checkpoint.memory import layout_key
from seatrial.control.coordinator.peers import Peers
from seatrial.control.snapshots import transfer
from seatrial.control.snapshots.snapshot_buffers import Common, common, newest_common
from seatrial.control.snapshots.transfer import Moving
from seatrial.job.layout import Layout
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.control.machine.world import World

Send = Callable[[int, msg.ToAgent], bool]


@dataclass(frozen=True)
class _Flush:
    """A state that is being written from memory to a checkpoint."""

    step: int
    trained_by: int  # generation
    generation: int  # the one that publishes it
    layout: Layout
    place: int  # the first one, or the fallback
    looks: bool = False  # the search for a checkpoint that is as new is still running


class SnapshotMap:
    """The snapshots in memory that all connected agents have reported."""

    def __init__(
        self,
        folder: RunFolder,
        places: Sequence[str],
        read_back: bool,
        send: Send,
        flushed: Callable[[int, bool, str], None],
    ) -> None:
        """`places`: where checkpoints go, then the fallback; `read_back`: written data is read back for verification.

        `flushed(step, ok, message)` is called once for each `flush`.
        """
        self._folder, self._places, self._read_back = folder, places, read_back
        self._send, self._flushed = send, flushed
        self._held: dict[int, list[dict[str, Any]]] = {}
        self._missing: dict[int, int] = {}  # rank whose part is being written -> node that does it
        self._flushing: _Flush | None = None
        self._child: Moving | None = None  # the child that looks, or publishes
        self._for: _Flush | None = None  # the flush that it works for

    def transfers(self) -> dict[int, str]:
        """The name of the running child process, by pid."""
        return {} if self._child is None else {self._child.pid: f"checkpoint transfer ({self._child.what})"}

    def held(self, node: int, entries: list[dict[str, Any]]) -> None:
        """Store the report of what `node` holds."""
        self._held[node] = entries

    def lost(self, node: int) -> None:
        """Drop a lost node and what it held."""
        self._held.pop(node, None)
        if node in self._missing.values():
            self._end(ok=False, message=f"node {node} was lost while snapshots were written to disk")

    def fetches(
        self,
        ranks: Mapping[int, Sequence[int]],
        layout: Layout,
        peers: Peers,
    ) -> dict[int, list[msg.Fetch]]:
        """What each node lacks of the newest state that is in memory for every rank, and which node has it.

        `ranks`: node -> its ranks.
        """
        wanted: dict[int, list[msg.Fetch]] = {node: [] for node in ranks}
        found = newest_common(self._held, layout.as_dict(), layout.world_size)
        if found is None:
            return wanted
        for node, of_node in ranks.items():
            own = [e for e in self._held.get(node, []) if e["own"]]
            for local, rank in enumerate(of_node):
                holders = [n for n in found.holders[rank] if n in peers]
                if any(_is(e, rank, found.step, found.generation, layout) for e in own) or not holders:
                    continue
                giver, part = holders[0], found.parts[rank]
                entry = next(
                    e for e in self._held[giver] if _is(e, part, found.step, found.generation, layout)
                )
                wanted[node].append(msg.Fetch(local, entry, peers.address(giver)))
        return wanted

    def flush(self, world: World | None) -> None:
        """Have the newest state in memory written as a checkpoint, unless a checkpoint is already as new."""
        if world is None:
            self._flushed(0, False, "")
            return
        layout = world.shape.layout
        found = newest_common(self._held, layout.as_dict(), layout.world_size)
        if found is None:
            self._flushed(0, False, "")
            return
        self._flushing = _Flush(found.step, found.generation, world.generation, layout, 0, looks=True)
        self._missing = {}
        self._next()

    def part(self, part: msg.Part) -> None:
        """Handle the report that a rank's part was written, or could not be."""
        flushing = self._flushing
        if flushing is None or flushing.looks:
            return
        if (part.step, part.place) != (flushing.step, self._places[flushing.place]):
            return  # of another flush
        if not part.ok:
            self._failed(f"rank {part.rank}: {part.message}")
            return
        self._missing.pop(part.rank, None)
        self._next()

    def _next(self) -> None:
        """Start the child that looks, or the one that publishes, when it is due. One at a time."""
        flushing = self._flushing
        if flushing is None or self._missing or self._child is not None:
            return
        self._for = flushing
        try:
            self._child = transfer.look(self._places) if flushing.looks else self._publish(flushing)
        except OSError as error:  # no process could be forked for it
            self._end(ok=False, message=str(error))

    def _publish(self, flushing: _Flush) -> Moving:
        return transfer.publish(
            self._folder,
            self._places[flushing.place],
            flushing.layout,
            flushing.step,
            generation=flushing.generation,
            trained_by=flushing.trained_by,
        )

    def reaped(self, pid: int) -> bool:
        """Handle the exit of a child of the agent; return whether it was ours."""
        if self._child is None or self._child.pid != pid:
            return False
        answer = self._child.result()
        self._child = None
        flushing = self._flushing
        if flushing is None or flushing is not self._for:
            self._next()  # its flush has ended before it; another one may have been waiting for it
        elif flushing.looks:
            # If the search fails, write anyway: if the checkpoint exists, publishing finds it.
            self._looked(flushing, int(answer["step"]) if answer["ok"] else 0)
        elif answer["ok"]:
            self._end(
                ok=True, message=f"the state after step {flushing.step} was written from memory to disk"
            )
        else:
            self._failed(str(answer["message"]))
        return True

    def _looked(self, flushing: _Flush, saved: int) -> None:
        if flushing.step <= saved:
            self._flushing = None
            self._flushed(saved, True, "")
            return
        self._write(replace(flushing, looks=False))

    def _write(self, flushing: _Flush) -> None:
        """Order the parts from the nodes that hold them now."""
        found = self._holders(flushing)
        self._flushing = flushing
        if found is None:
            self._end(ok=False, message="it is no longer in memory")
            return
        self._missing = {rank: nodes[0] for rank, nodes in found.holders.items()}
        by_node: dict[int, list[dict[str, Any]]] = {}
        for rank, nodes in found.holders.items():
            entries, part = self._held[nodes[0]], found.parts[rank]
            entry = next(e for e in entries if _is(e, part, found.step, found.generation, flushing.layout))
            if part != rank:
                entry = {**entry, "replica": [rank, flushing.layout.coordinates(rank).replicate == 0]}
            by_node.setdefault(nodes[0], []).append(entry)
        for node, entries in by_node.items():
            place = self._places[flushing.place]
            order = msg.Flush(flushing.step, flushing.generation, entries, place, self._read_back)
            if not self._send(node, order):
                self._end(ok=False, message=f"node {node} was lost before it could write its snapshots")
                return

    def _holders(self, flushing: _Flush) -> Common | None:
        layout = flushing.layout
        for found in common(self._held, layout.as_dict(), layout.world_size):
            if (found.step, found.generation) == (flushing.step, flushing.trained_by):
                return found
        return None

    def _failed(self, message: str) -> None:
        """Handle a storage failure: retry with the fallback, if there is one."""
        flushing = self._flushing
        if flushing is None or flushing.place + 1 >= len(self._places):
            self._end(ok=False, message=message)
        else:
            self._write(replace(flushing, place=flushing.place + 1))

    def _end(self, *, ok: bool, message: str) -> None:
        flushing = self._flushing
        if flushing is None:
            return
        self._flushing, self._missing = None, {}
        text = message if ok else f"step {flushing.step} could not be written from memory to disk: {message}"
        self._flushed(flushing.step if ok else 0, ok, text)


def _is(entry: Mapping[str, Any], rank: int, step: int, generation: int, layout: Layout) -> bool:
    key = layout_key(layout.as_dict())
    return (entry["rank"], entry["step"], entry["generation"], entry["layout"]) == (
        rank,
        step,
        generation,
        key,
    )
