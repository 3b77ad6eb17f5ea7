"""Which node holds whose state in memory, as the coordinator knows it: who must fetch what, and what goes to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from seatrial.checkpoint.manifest import named, step_of
from seatrial.checkpoint.memory import layout_key
from seatrial.control import transfer
from seatrial.control.keeper import newest_common
from seatrial.control.peers import Peers
from seatrial.control.transfer import Moving
from seatrial.job.layout import Layout
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.control.world import World

Send = Callable[[int, dict[str, Any]], bool]


class SnapshotMap:
    """What all living agents have told of their memory."""

    def __init__(self, folder: RunFolder, send: Send, flushed: Callable[[int, bool, str], None]) -> None:
        """`flushed(step, ok, message)` is called once for each `flush`."""
        self._folder, self._send, self._flushed = folder, send, flushed
        self._held: dict[int, list[dict[str, Any]]] = {}
        self._missing: dict[int, int] = {}  # rank whose part is being written -> node that does it
        self._flushing: tuple[int, int, int, Layout] | None = None  # step, trained by, generation, layout
        self._publishing: Moving | None = None
        self._published: tuple[int, int, int, Layout] | None = None  # the flush that it is for

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
            giver = holders[0]
            entry = next(e for e in self._held[giver] if _is(e, rank, found.step, found.generation, layout))
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
        saved = named(self._folder.checkpoints)
        on_disk = (step_of(saved[0]) or 0) if saved else 0
        if found is None or found.step <= on_disk:
            self._flushed(on_disk, on_disk > 0, "")
            return
        self._flushing = (found.step, found.generation, world.generation, layout)
        self._missing = {rank: nodes[0] for rank, nodes in found.holders.items()}
        by_node: dict[int, list[dict[str, Any]]] = {}
        for rank, nodes in found.holders.items():
            entry = next(
                e for e in self._held[nodes[0]] if _is(e, rank, found.step, found.generation, layout)
            )
            by_node.setdefault(nodes[0], []).append(entry)
        for node, entries in by_node.items():
            order = {"step": found.step, "generation": world.generation, "snapshots": entries}
            if not self._send(node, {"flush": order}):
                self._end(ok=False, message=f"node {node} went away before it could write its snapshots")
                return

    def part(self, values: dict[str, Any]) -> None:
        """A rank's part is written, or could not be."""
        if self._flushing is None or values["step"] != self._flushing[0]:
            return
        if not values["ok"]:
            self._end(ok=False, message=f"rank {values['rank']}: {values['message']}")
            return
        self._missing.pop(values["rank"], None)
        self._publish()

    def _publish(self) -> None:
        if self._flushing is None or self._missing or self._publishing is not None:
            return
        step, trained_by, generation, layout = self._published = self._flushing
        try:
            self._publishing = transfer.publish(
                self._folder, layout, step, generation=generation, trained_by=trained_by
            )
        except OSError as error:  # not even a process could be had for it
            self._end(ok=False, message=str(error))

    def reaped(self, pid: int) -> bool:
        """A child of the agent has ended; whether it was ours."""
        if self._publishing is None or self._publishing.pid != pid:
            return False
        answer = self._publishing.result()
        self._publishing = None
        if self._flushing is None or self._flushing is not self._published:
            self._publish()  # it was for a flush that has ended without it; another may have waited for its end
        elif answer["ok"]:
            self._end(ok=True, message=f"the state after step {self._flushing[0]} went from memory to disk")
        else:
            self._end(ok=False, message=str(answer["message"]))
        return True

    def _end(self, *, ok: bool, message: str) -> None:
        if self._flushing is None:
            return
        step, self._flushing, self._missing = self._flushing[0], None, {}
        text = message if ok else f"step {step} could not be written from memory to disk: {message}"
        self._flushed(step if ok else 0, ok, text)


def _is(entry: Mapping[str, Any], rank: int, step: int, generation: int, layout: Layout) -> bool:
    key = layout_key(layout.as_dict())
    return (entry["rank"], entry["step"], entry["generation"], entry["layout"]) == (
        rank,
        step,
        generation,
        key,
    )
