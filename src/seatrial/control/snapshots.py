"""Which node holds whose state in memory, as the coordinator knows it: who must fetch what, and what goes to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from seatrial.checkpoint.memory import layout_key
from seatrial.control import transfer
from seatrial.control.keeper import Common, common, newest_common
from seatrial.control.peers import Peers
from seatrial.control.transfer import Moving
from seatrial.job.layout import Layout
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.control.world import World

Send = Callable[[int, dict[str, Any]], bool]


@dataclass(frozen=True)
class _Flush:
    """A state on its way from memory into a checkpoint."""

    step: int
    trained_by: int  # generation
    generation: int  # that publishes it
    layout: Layout
    place: int  # the first one, or the fallback
    looks: bool = False  # whether there is one as new already is being looked for


class SnapshotMap:
    """What all living agents have told of their memory."""

    def __init__(
        self,
        folder: RunFolder,
        places: Sequence[str],
        read_back: bool,
        send: Send,
        flushed: Callable[[int, bool, str], None],
    ) -> None:
        """`places`: where checkpoints go, and then the fallback; `read_back`: what is written there is read again.

        `flushed(step, ok, message)` is called once for each `flush`.
        """
        self._folder, self._places, self._read_back = folder, places, read_back
        self._send, self._flushed = send, flushed
        self._held: dict[int, list[dict[str, Any]]] = {}
        self._missing: dict[int, int] = {}  # rank whose part is being written -> node that does it
        self._flushing: _Flush | None = None
        self._child: Moving | None = None  # that looks, or publishes
        self._for: _Flush | None = None  # what it does that for

    def transfers(self) -> dict[int, str]:
        """The name of the running child process, by pid."""
        return {} if self._child is None else {self._child.pid: f"checkpoint transfer ({self._child.what})"}

    def held(self, node: int, entries: list[dict[str, Any]]) -> None:
        """`node` told what it holds."""
        self._held[node] = entries

    def lost(self, node: int) -> None:
        """What it held is gone with it."""
        self._held.pop(node, None)
        if node in self._missing.values():
            self._end(ok=False, message=f"node {node} was lost while snapshots were written to disk")

    def fetches(
        self,
        node: int,
        ranks: list[int],
        layout: Layout,
        peers: Peers,
    ) -> list[dict[str, Any]]:
        """What `node` lacks of the newest state that is in memory somewhere for every rank, and who has it."""
        found = newest_common(self._held, layout.as_dict(), layout.world_size)
        if found is None:
            return []
        wanted = []
        for local, rank in enumerate(ranks):
            holders = [n for n in found.holders[rank] if n in peers]
            own = [e for e in self._held.get(node, []) if e["own"]]
            if any(_is(e, rank, found.step, found.generation, layout) for e in own) or not holders:
                continue
            giver, part = holders[0], found.parts[rank]
            entry = next(e for e in self._held[giver] if _is(e, part, found.step, found.generation, layout))
            source = {"address": peers[giver].address, "port": peers[giver].port}
            wanted.append({"local": local, "snapshot": entry, "from": source})
        return wanted

    def flush(self, world: World | None) -> None:
        """Have the newest state in memory written as a checkpoint, unless there is one as new already."""
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

    def part(self, values: dict[str, Any]) -> None:
        """A rank's part is written, or could not be."""
        flushing = self._flushing
        if flushing is None or flushing.looks:
            return
        if (values["step"], values["place"]) != (flushing.step, self._places[flushing.place]):
            return  # of another flush
        if not values["ok"]:
            self._failed(f"rank {values['rank']}: {values['message']}")
            return
        self._missing.pop(values["rank"], None)
        self._next()

    def _next(self) -> None:
        """Start the child that looks, or the one that publishes, if it is time for it. One at a time."""
        flushing = self._flushing
        if flushing is None or self._missing or self._child is not None:
            return
        self._for = flushing
        try:
            self._child = transfer.look(self._places) if flushing.looks else self._publish(flushing)
        except OSError as error:  # not even a process could be had for it
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
        """A child of the agent has ended; whether it was ours."""
        if self._child is None or self._child.pid != pid:
            return False
        answer = self._child.result()
        self._child = None
        flushing = self._flushing
        if flushing is None or flushing is not self._for:
            self._next()  # it was for a flush that has ended without it; another may have waited for its end
        elif flushing.looks:
            # What cannot be seen is no reason not to write: if it is there, publishing finds that out.
            self._looked(flushing, int(answer["step"]) if answer["ok"] else 0)
        elif answer["ok"]:
            self._end(ok=True, message=f"the state after step {flushing.step} went from memory to disk")
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
        """Order the parts from who holds them now."""
        found = self._holders(flushing)
        self._flushing = flushing
        if found is None:
            self._end(ok=False, message="it is not in memory any more")
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
            order = {
                "step": flushing.step,
                "generation": flushing.generation,
                "snapshots": entries,
                "place": self._places[flushing.place],
                "read_back": self._read_back,
            }
            if not self._send(node, {"flush": order}):
                self._end(ok=False, message=f"node {node} went away before it could write its snapshots")
                return

    def _holders(self, flushing: _Flush) -> Common | None:
        layout = flushing.layout
        for found in common(self._held, layout.as_dict(), layout.world_size):
            if (found.step, found.generation) == (flushing.step, flushing.trained_by):
                return found
        return None

    def _failed(self, message: str) -> None:
        """The storage did not take it: once more into the fallback, if there is one."""
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
