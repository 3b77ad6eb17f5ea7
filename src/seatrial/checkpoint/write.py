"""Writing a checkpoint: complete or absent, never half.

Every rank writes its own file into a temporary folder and makes it durable; then one rank writes the manifest and
renames the folder. A death at any moment leaves the temporary folder or the complete one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.commit import Fence, commit, make_index, part_name, write_index
from seatrial.checkpoint.manifest import File, Manifest, complete, folder_name, leftovers
from seatrial.checkpoint.stream import write_safetensors


class SaveFailed(SeatrialError):
    """A checkpoint could not be written (disk full, no permission, ...). What was there before is untouched."""


class PeerSaveFailed(SaveFailed):
    """The same, in a rank that could write its own part: another one knows the reason."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank saves."""

    key: str  # "KIND/NAME"
    tensor: Tensor
    box: Box
    whole: tuple[int, ...]
    owner: bool = True  # exactly one rank holds each box as owner

    def to_index(self) -> dict[str, Any]:
        """Its entry in the index of the file that holds it."""
        return {
            "key": self.key,
            "shape": self.whole,
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "offsets": self.box.offsets,
            "sizes": self.box.sizes,
            "owner": self.owner,
        }


def _unfenced() -> None:
    """For a folder that only one process ever writes to."""


# Returns how many ranks call with False; all ranks call it, and none goes on before all have.
Agree = Callable[[bool], int]


def save(
    checkpoints: Path,
    manifest: Manifest,
    pieces: Iterable[Piece],
    *,
    rank: int,
    world_size: int,
    agree: Agree,
    fence: Fence = _unfenced,
) -> Path:
    """Write one checkpoint; every rank calls it with the same `manifest` (without files and tensors).

    `fence` raises Superseded where this generation may not publish any more. Returns the complete folder. Raises
    SaveFailed in every rank if any rank could not write; the temporary folder is then removed.
    """
    progress = manifest.progress
    final = checkpoints / folder_name(progress.step)
    temporary = checkpoints / f"{final.name}.tmp-{progress.generation}"
    problem = _attempt(lambda: _write_rank(temporary, list(pieces), rank))
    if agree(problem is None):
        raise _abandon(temporary, problem, rank)
    if rank == 0:
        problem = _attempt(lambda: commit(temporary, final, manifest, world_size, fence))
    if agree(problem is None):
        raise _abandon(temporary, problem, rank)
    return final


def _attempt(work: Callable[[], None]) -> str | None:
    # The others are told, whatever it was: one that is silent would leave them waiting.
    try:
        work()
    except (OSError, ValueError, KeyError, TypeError, SeatrialError) as error:
        return str(error)
    return None


def _abandon(temporary: Path, problem: str | None, rank: int) -> SaveFailed:
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    if problem is None:
        return PeerSaveFailed("another rank could not write its part")
    return SaveFailed(f"{temporary}: {problem}")


def _write_rank(folder: Path, pieces: list[Piece], rank: int) -> None:
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone must not come back half
    name = part_name(rank)
    size, digest = write_safetensors(folder / name, [(p.key, p.tensor) for p in pieces])
    write_index(folder, rank, make_index(File(name, size, digest), [p.to_index() for p in pieces]))


def _set_aside_for_removal(folder: Path) -> Path:
    """Rename a complete checkpoint first: a death half-way through deleting it leaves a leftover, not a damaged one."""
    doomed = folder.with_name(f"{folder.name}.tmp-removed-{os.getpid()}")
    os.rename(folder, doomed)
    return doomed


def remove_leftovers(checkpoints: Path) -> list[Path]:
    """Remove what dead saves and removals left; returns what was removed. Only one rank may call it."""
    found = leftovers(checkpoints)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def remove_old(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints; returns what was removed. Only one rank may call it."""
    old = complete(checkpoints)[max(1, keep) :]
    for folder in old:
        shutil.rmtree(_set_aside_for_removal(folder), ignore_errors=True)
    return old
