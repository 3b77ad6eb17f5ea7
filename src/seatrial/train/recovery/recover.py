"""The state a generation resumes from: ranks all-gather which states each has, and all make the same decision.

The newest state wins. At equal steps: live processes first (ranks that lost theirs receive a live replica's by
broadcast), then snapshots in memory, then checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.job.layout import Coordinates, Layout
from seatrial.parallel.mesh import Mesh

Kind = Literal["carried", "replica", "memory", "disk", "fresh"]
NO_STEP = -1


# Generation and step. A later generation's snapshot is newer even at a lower step: it abandoned the other trajectory.
SnapshotId = tuple[int, int]
NO_SNAPSHOT: SnapshotId = (NO_STEP, NO_STEP)


@dataclass(frozen=True)
class Offer:
    """The states that one rank could resume from, as steps; -1 for none."""

    applied: int = NO_STEP  # this process has the state after that step
    ready: int = NO_STEP  # ... and the final gradients of that step
    memory: tuple[SnapshotId, SnapshotId] = (NO_SNAPSHOT, NO_SNAPSHOT)  # in its two memory files


@dataclass(frozen=True)
class Source:
    """The source of the state."""

    kind: Kind
    step: int  # the state after that step
    generation: int = NO_STEP  # of the snapshot

    def root(self, offers: Sequence[Offer], layout: Layout, rank: int) -> int | None:
        """The rank that sends its state to `rank`; None where `rank` receives none."""
        if self.kind != "replica" or _has_state(offers[rank], self.step):
            return None
        return _replica_with_state(offers, layout, layout.coordinates(rank), self.step)


def decide(offers: Sequence[Offer], layout: Layout, disk_step: int) -> Source:
    """The newest state that every rank can get; at equal steps the fastest to load. `disk_step` 0: no checkpoint."""
    found = [_from_processes(offers, layout), from_memory(offers)]
    if disk_step > 0:
        found.append(Source("disk", disk_step))
    known = [s for s in found if s is not None]
    # max() keeps the first of equals.
    return max(known, key=lambda s: s.step) if known else Source("fresh", 0)


def newest_on_disk(
    mesh: Mesh, nearest: Source, look: Callable[[], int], unseen: Callable[[str], None]
) -> int:
    """The step of the newest checkpoint, 0 if there is none or it does not matter; all ranks call it.

    `nearest` is the best state without the disk. The state of live processes is never older than a checkpoint: then the
    disk is not read. With a snapshot in memory the wait is bounded, see `Places.find_newest`, and an error is passed to
    `unseen`. Otherwise the disk is the only source: the code that reads it next raises the error.
    """
    if nearest.kind in ("carried", "replica"):
        return 0
    newest = 0
    if mesh.rank == 0:
        try:
            newest = look()
        except (OSError, SeatrialError) as error:
            if nearest.kind == "memory":
                unseen(str(error))
    return sum_value(mesh, newest)


def _from_processes(offers: Sequence[Offer], layout: Layout) -> Source | None:
    newest = max(o.applied for o in offers)
    if newest < 0:
        return None
    if all(_has_state(o, newest) for o in offers):
        return Source("carried", newest)
    for rank in range(layout.world_size):
        if _replica_with_state(offers, layout, layout.coordinates(rank), newest) is None:
            return None
    return Source("replica", newest)


def _has_state(offer: Offer, step: int) -> bool:
    """Whether this process has the state after `step`, or can still apply that step's update.

    If one rank applied it, every rank's gradients were final: the all-reduce before the update needed all of them. A
    rank that did not receive the sum can apply the same update once it gets it.
    """
    return offer.applied == step or (offer.applied == step - 1 and offer.ready == step)


def _replica_with_state(offers: Sequence[Offer], layout: Layout, at: Coordinates, step: int) -> int | None:
    for replicate in range(layout.replicate):
        rank = layout.rank(Coordinates(at.pipeline, replicate, at.shard, at.tensor))
        if _has_state(offers[rank], step):
            return rank
    return None


def from_memory(offers: Sequence[Offer]) -> Source | None:
    """The newest snapshot that every rank has."""
    common = set(offers[0].memory)
    for offer in offers[1:]:
        common &= set(offer.memory)
    generation, step = max(common, default=NO_SNAPSHOT)
    return Source("memory", step, generation) if step >= 0 else None


def gather_offers(mesh: Mesh, offer: Offer) -> list[Offer]:
    """Every rank's offer, in rank order; all ranks call it."""
    table = torch.zeros(mesh.layout.world_size, 6, dtype=torch.float64, device=mesh.device)
    own = [offer.applied, offer.ready, *offer.memory[0], *offer.memory[1]]
    table[mesh.rank] = torch.tensor(own, dtype=torch.float64)
    mesh.sum_over_ranks(table)
    return [Offer(a, r, ((g0, s0), (g1, s1))) for a, r, g0, s0, g1, s1 in table.long().tolist()]


def broadcast_from(mesh: Mesh, rank: int, values: Sequence[float]) -> list[float]:
    """Broadcast the `values` of `rank`; all ranks call it, with equally many values."""
    row = torch.zeros(len(values), dtype=torch.float64, device=mesh.device)
    if mesh.rank == rank:
        row.copy_(torch.tensor(values, dtype=torch.float64))
    mesh.sum_over_ranks(row)
    return [float(v) for v in row]


def sum_value(mesh: Mesh, value: int) -> int:
    """The sum of `value` over all ranks."""
    return int(mesh.sum_over_ranks(torch.tensor([value], device=mesh.device)).item())


class Unfilled:
    """Placeholder weight source for a model whose state is restored right afterwards."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Zeros of the box's shape."""
        return torch.zeros(box.sizes, dtype=dtype)
