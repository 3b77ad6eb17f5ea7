"""The state a generation resumes from: ranks exchange what each still holds, and all make the same decision.

Preferred is the state held by live processes, that of the last finished step. A rank that lost its own takes it from a
live replica. Next come the snapshots in memory, then the checkpoints on disk.
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
NOTHING = -1


# Generation and step of a snapshot. A later generation's is newer even at a lower step: it abandoned the other's
# trajectory.
Moment = tuple[int, int]
NEVER: Moment = (NOTHING, NOTHING)


@dataclass(frozen=True)
class Offer:
    """The states that one rank could resume from, as steps; -1 for none."""

    applied: int = NOTHING  # this process holds the state after that step
    ready: int = NOTHING  # ... and the final gradients of that step
    memory: tuple[Moment, Moment] = (NEVER, NEVER)  # what its two memory files hold


@dataclass(frozen=True)
class Source:
    """The source of the state."""

    kind: Kind
    step: int  # the state after that step
    generation: int = NOTHING  # of the snapshot

    def root(self, offers: Sequence[Offer], layout: Layout, rank: int) -> int | None:
        """The rank that sends its state to `rank`; None where `rank` receives none."""
        if self.kind != "replica" or _alive_at(offers[rank], self.step):
            return None
        return _living_replica(offers, layout, layout.coordinates(rank), self.step)


def decide(offers: Sequence[Offer], layout: Layout, disk_step: int) -> Source:
    """The newest state that every rank can obtain; at equal steps the nearest one. `disk_step` 0: no checkpoint."""
    found = [_from_processes(offers, layout), from_memory(offers)]
    if disk_step > 0:
        found.append(Source("disk", disk_step))
    known = [s for s in found if s is not None]
    # max() keeps the first of equals.
    return max(known, key=lambda s: s.step) if known else Source("fresh", 0)


def newest_on_disk(
    mesh: Mesh, nearest: Source, look: Callable[[], int], unseen: Callable[[str], None]
) -> int:
    """The step of the newest checkpoint, 0 where there is none or where it does not matter; all ranks call it.

    `nearest` is the best state without the disk. What processes hold is never older than a checkpoint, which is a copy
    of it: then the disk is not read. With a snapshot in memory the wait is bounded, see `Places.look`, and an error is
    passed to `unseen`. Otherwise the disk is the only source: the code that reads it next raises the error.
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
    return count(mesh, newest)


def _from_processes(offers: Sequence[Offer], layout: Layout) -> Source | None:
    newest = max(o.applied for o in offers)
    if newest < 0:
        return None
    if all(_alive_at(o, newest) for o in offers):
        return Source("carried", newest)
    for rank in range(layout.world_size):
        if _living_replica(offers, layout, layout.coordinates(rank), newest) is None:
            return None
    return Source("replica", newest)


def _alive_at(offer: Offer, step: int) -> bool:
    """Whether this process has the state after `step`, or can finish that step by itself.

    If one rank has applied an update, every rank's gradients of that step were final: the sum before the update needed
    all of them. A rank that did not receive the sum can still apply the same update once it gets it.
    """
    return offer.applied == step or (offer.applied == step - 1 and offer.ready == step)


def _living_replica(offers: Sequence[Offer], layout: Layout, at: Coordinates, step: int) -> int | None:
    for replicate in range(layout.replicate):
        rank = layout.rank(Coordinates(at.pipeline, replicate, at.shard, at.tensor))
        if _alive_at(offers[rank], step):
            return rank
    return None


def from_memory(offers: Sequence[Offer]) -> Source | None:
    """The newest snapshot that every rank has."""
    common = set(offers[0].memory)
    for offer in offers[1:]:
        common &= set(offer.memory)
    generation, step = max(common, default=NEVER)
    return Source("memory", step, generation) if step >= 0 else None


def exchange(mesh: Mesh, offer: Offer) -> list[Offer]:
    """Every rank's offer, in rank order; all ranks call it."""
    table = torch.zeros(mesh.layout.world_size, 6, dtype=torch.float64, device=mesh.device)
    own = [offer.applied, offer.ready, *offer.memory[0], *offer.memory[1]]
    table[mesh.rank] = torch.tensor(own, dtype=torch.float64)
    mesh.sum_over_ranks(table)
    return [Offer(a, r, ((g0, s0), (g1, s1))) for a, r, g0, s0, g1, s1 in table.long().tolist()]


def share_from(mesh: Mesh, rank: int, values: Sequence[float]) -> list[float]:
    """Send the `values` of `rank` to every rank; all call it, with equally many values."""
    row = torch.zeros(len(values), dtype=torch.float64, device=mesh.device)
    if mesh.rank == rank:
        row.copy_(torch.tensor(values, dtype=torch.float64))
    mesh.sum_over_ranks(row)
    return [float(v) for v in row]


def count(mesh: Mesh, value: int) -> int:
    """The sum of `value` over all ranks."""
    return int(mesh.sum_over_ranks(torch.tensor([value], device=mesh.device)).item())


class Unfilled:
    """Placeholder weight source for a model whose state is filled immediately afterwards."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Zeros of the box's shape."""
        return torch.zeros(box.sizes, dtype=dtype)
