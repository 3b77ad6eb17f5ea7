"""Saving a checkpoint at once: every rank waits until it is complete. Training saves with `staging.AsyncWriter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.commit import Fence
from seatrial.checkpoint.manifest import Manifest, Progress, folder_name
from seatrial.checkpoint.memory import Filling
from seatrial.checkpoint.place import Place, open_place
from seatrial.checkpoint.stream import FilePlan, raw_bytes
from seatrial.checkpoint.write import PeerSaveFailed, Piece, SaveFailed, boxes_of

# Returns how many ranks call with False; all ranks call it, and none goes on before all have.
Agree = Callable[[bool], int]


def unfenced() -> None:
    """The fence of a place that only one process ever writes to."""


def new_manifest(progress: Progress, **more: Any) -> Manifest:
    """Of a checkpoint that is still to be written; `more` is what it says besides."""
    nothing: dict[str, Any] = {
        "architecture": {},
        "layout": {},
        "job_sha256": "",
        "code": "",
        "files": [],
        "tensors": {},
    }
    return Manifest(**{"progress": progress, "time": 1.0, "seed": 1, "read_back": False, **nothing, **more})


def save_whole(checkpoints: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint of one rank that holds all of `tensors`, by their keys; its folder."""
    pieces = [Piece(key, t, Box.whole(t.shape), tuple(t.shape)) for key, t in tensors.items()]
    checkpoints.mkdir(parents=True, exist_ok=True)
    return save(checkpoints, manifest, pieces, rank=0, world_size=1, agree=lambda ok: not ok)


def save(
    checkpoints: Path,
    manifest: Manifest,
    pieces: Iterable[Piece],
    *,
    rank: int,
    world_size: int,
    agree: Agree,
    fence: Fence = unfenced,
) -> Path:
    """Write one checkpoint; every rank calls it with the same `manifest` (without files and tensors).

    `fence` raises Superseded where this generation may not publish any more. Returns the complete folder. Raises
    SaveFailed in every rank if any rank could not write; what was written is then removed.
    """
    place = open_place(str(checkpoints))
    step, generation = manifest.progress.step, manifest.progress.generation
    problem = _attempt(lambda: _write_part(place, step, generation, rank, list(pieces)))
    if agree(problem is None):
        raise _abandon(place, step, generation, problem, rank)
    if rank == 0:
        problem = _attempt(lambda: place.commit(step, generation, manifest, world_size, fence))
    if agree(problem is None):
        raise _abandon(place, step, generation, problem, rank)
    return checkpoints / folder_name(step)


def _attempt(work: Callable[[], object]) -> str | None:
    # The others are told, whatever it was: one that is silent would leave them waiting.
    try:
        work()
    except (OSError, ValueError, KeyError, TypeError, SeatrialError) as error:
        return str(error)
    return None


def _abandon(place: Place, step: int, generation: int, problem: str | None, rank: int) -> SaveFailed:
    if rank == 0:
        place.abandon(step, generation)
    if problem is None:
        return PeerSaveFailed("another rank could not write its part")
    return SaveFailed(f"{place.where(step)}: {problem}")


def _write_part(place: Place, step: int, generation: int, rank: int, pieces: list[Piece]) -> None:
    plan = FilePlan([(p.key, p.tensor) for p in pieces])
    head = plan.head(boxes_of(pieces))
    size = len(head) + plan.data_bytes
    fd = os.memfd_create("seatrial-save")
    try:
        filling = Filling(fd, size)
        filling.add(head)
        for piece in pieces:
            if piece.tensor.numel():
                filling.add(raw_bytes(piece.tensor.detach().cpu().contiguous()))
        filling.finish()
        index = {"pieces": [piece.to_index() for piece in pieces]}
        place.put_part(step, generation, rank, fd, size, index, read_back=False)
    finally:
        os.close(fd)
