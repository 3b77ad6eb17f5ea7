"""The memory files of one node: snapshots of its own ranks, and copies for ranks of another node.

Every file belongs to the agent, so a rank's state outlives the rank; the copy outlives the node. Each rank has two
files (double buffering): while one is being replaced the other is complete.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Snapshot, layout_key
from seatrial.job.layout import Layout
from seatrial.record.messages import SnapshotFilled


@dataclass(frozen=True)
class Held:
    """A snapshot and the memory file that contains it."""

    snapshot: Snapshot
    fd: int
    own: bool  # of a rank of this node; otherwise a copy for another one


@dataclass
class _Pair:
    """Two memory files, and their reported content."""

    own: bool
    fds: tuple[int, int]
    content: list[Snapshot | None] = field(default_factory=lambda: [None, None])
    filling: int | None = None  # index of the file that a copy is being written to

    @classmethod
    def make(cls, name: str, *, own: bool) -> _Pair:
        first = os.memfd_create(f"seatrial-{name}-0")
        return cls(own, (first, os.memfd_create(f"seatrial-{name}-1")))

    def whole(self) -> list[Held]:
        """The complete snapshots, newest first."""
        found = [
            Held(snapshot, self.fds[slot], self.own)
            for slot, snapshot in enumerate(self.content)
            if snapshot is not None and memory.holds(self.fds[slot], snapshot)
        ]
        return sorted(found, key=lambda held: held.snapshot.age, reverse=True)

    def older(self) -> int:
        """The file whose content is to be replaced next."""
        whole = {held.fd: held.snapshot.age for held in self.whole()}
        return min((0, 1), key=lambda slot: whole.get(self.fds[slot], (-1, -1)))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class SnapshotBuffers:
    """All snapshots of one agent. Child processes (`control.snapshots.transfer`) fill files; this tracks the result."""

    def __init__(self, local_slots: int) -> None:
        """Create two empty memory files for each local slot. Raises OSError if that fails."""
        self._own = [_Pair.make(f"local{local}", own=True) for local in range(local_slots)]
        self._copies: dict[tuple[str, int], _Pair] = {}  # layout, rank
        self._abandoned: list[tuple[int, int]] = []  # generations, and the steps after which they began

    def fds(self, local: int) -> tuple[int, int]:
        """The files of a local slot, for its ranks to inherit. They stay the same."""
        return self._own[local].fds

    def rank_filled(self, local: int, message: SnapshotFilled) -> Snapshot:
        """Handle the message of local slot `local`'s rank that a file is complete. ValueError if it is invalid."""
        snapshot = Snapshot.from_message(vars(message))
        if message.slot not in (0, 1):
            raise ValueError(f"a snapshot in file {message.slot}")
        self._own[local].content[message.slot] = snapshot if self._counts(snapshot) else None
        return snapshot

    def entries_for(self, local: int, rank: int, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The snapshots of `rank` and `layout` in the files of a local slot, newest first: a spec's "snapshots"."""
        pair, key = self._own[local], layout_key(layout)
        replicas = Layout.from_dict(layout).replicas(rank)
        return [
            {
                "slot": pair.fds.index(held.fd),
                "rank": held.snapshot.rank,
                "step": held.snapshot.step,
                "generation": held.snapshot.generation,
                "bytes": held.snapshot.bytes,
                "hash": held.snapshot.hash,
            }
            for held in pair.whole()
            if held.snapshot.rank in replicas and held.snapshot.layout == key
        ]

    def whole(self) -> list[Held]:
        """All complete snapshots."""
        return [held for pair in (*self._own, *self._copies.values()) for held in pair.whole()]

    def held(self) -> list[dict[str, Any]]:
        """The same for the coordinator, as JSON: each one's origin, size and hash, and whether it is our own rank's."""
        return [{**held.snapshot.summary(), "own": held.own} for held in self.whole()]

    def find(self, rank: int, step: int, generation: int, layout: str) -> Held | None:
        """The file with that state, our own rank's first; None if it is not here."""
        wanted = (rank, step, generation, layout)
        for held in self.whole():
            s = held.snapshot
            if (s.rank, s.step, s.generation, s.layout) == wanted:
                return held
        return None

    # -- incoming copies

    def buffer_for(self, snapshot: Snapshot, local: int | None = None) -> int | None:
        """Reserve the file to write a copy of `snapshot` to; call `filled` afterwards.

        One of local slot `local`, whose rank must not be running; or, without `local`, one for ranks of other nodes.
        None if the last copy is still in flight, or the state is already here; for another node's rank also if a newer
        state is here.
        """
        if local is not None:
            pair = self._own[local]
        else:
            key = (snapshot.layout, snapshot.rank)
            if key not in self._copies:
                self._copies[key] = _Pair.make(f"copy{snapshot.rank}", own=False)
            pair = self._copies[key]
        if pair.filling is not None:
            return None
        for there in (held.snapshot for held in pair.whole()):
            same = (there.rank, there.layout) == (snapshot.rank, snapshot.layout)
            # A start may need an older state than the one here: the newest that is available for all ranks.
            if same and (there.age == snapshot.age or (local is None and there.age > snapshot.age)):
                return None
        slot = pair.older()
        pair.content[slot], pair.filling = None, slot
        return pair.fds[slot]

    def filled(self, fd: int, snapshot: Snapshot | None) -> None:
        """Writing to `fd` has ended; it holds `snapshot`, or nothing if the copy failed."""
        for pair in (*self._own, *self._copies.values()):
            if pair.filling is not None and pair.fds[pair.filling] == fd:
                counts = snapshot is not None and self._counts(snapshot)
                pair.content[pair.filling], pair.filling = snapshot if counts else None, None
                return

    # -- dropping snapshots

    def guard(self, ranks: Collection[int], layout: Mapping[str, Any]) -> None:
        """Keep copies for these ranks of `layout` only, and free the memory of all others."""
        wanted = {(layout_key(layout), rank) for rank in ranks}
        for key in [key for key in self._copies if key not in wanted]:
            if self._copies[key].filling is None:
                self._copies.pop(key).close()

    def generation_started(self, generation: int, step: int) -> None:
        """Generation `generation` resumed after `step`: later snapshots of earlier generations are abandoned.

        This includes snapshots that are still being written or in flight.
        """
        self._abandoned.append((generation, step))
        for pair in (*self._own, *self._copies.values()):
            for slot, snapshot in enumerate(pair.content):
                if snapshot is not None and not self._counts(snapshot):
                    pair.content[slot] = None

    def forget(self, generation: int, step: int) -> None:
        """Drop snapshots of `generation` after `step`. New copies of those steps will arrive with other content."""
        for pair in (*self._own, *self._copies.values()):
            for slot, snapshot in enumerate(pair.content):
                if snapshot is not None and snapshot.generation == generation and snapshot.step > step:
                    pair.content[slot] = None

    def _counts(self, snapshot: Snapshot) -> bool:
        return not any(
            snapshot.generation < generation and snapshot.step > step for generation, step in self._abandoned
        )

    def close(self) -> None:
        """Free all memory that no other process has open."""
        for pair in (*self._own, *self._copies.values()):
            pair.close()
        self._own.clear()
        self._copies.clear()


@dataclass(frozen=True)
class Common:
    """A state that is in memory for all ranks."""

    step: int
    generation: int
    parts: dict[int, int]  # rank -> the rank whose part to use: itself, or a replica if no node has its own
    holders: dict[int, list[int]]  # rank -> nodes that have its part; the part's own node comes first


def common(
    held: Mapping[int, Sequence[Mapping[str, Any]]],
    layout: Mapping[str, Any],
    world_size: int,
) -> Iterator[Common]:
    """The states for which every rank's part, or that of a replica, is available, newest first.

    `held`: node -> its `SnapshotBuffers.held()`, for live nodes. Parts of different generations are never combined:
    they may have the same step but a different history.
    """
    key = layout_key(layout)
    found: dict[tuple[int, int], dict[int, list[tuple[bool, int]]]] = {}
    for node, entries in held.items():
        for entry in entries:
            if entry["layout"] == key:
                parts = found.setdefault((entry["generation"], entry["step"]), {})
                parts.setdefault(entry["rank"], []).append((not entry["own"], node))
    at = Layout.from_dict(layout)
    for (generation, step), parts in sorted(found.items(), reverse=True):
        replica = {
            at.first_replica(part): part for part in sorted(parts, reverse=True)
        }  # the lowest available one
        whose = {r: r if r in parts else replica.get(at.first_replica(r)) for r in range(world_size)}
        known = {rank: part for rank, part in whose.items() if part is not None}
        if len(known) == world_size:
            holders = {rank: [n for _, n in sorted(parts[part])] for rank, part in known.items()}
            yield Common(step, generation, known, holders)


def newest_common(
    held: Mapping[int, Sequence[Mapping[str, Any]]],
    layout: Mapping[str, Any],
    world_size: int,
) -> Common | None:
    """The newest of `common`, or None."""
    return next(common(held, layout, world_size), None)
