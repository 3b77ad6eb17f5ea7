"""Writing a checkpoint: complete or absent, never half.

Every rank writes its own file into a temporary folder and makes it durable; then one rank writes the manifest and
renames the folder. A death at any moment leaves the temporary folder or the complete one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from seatrial.base import atomic
from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    Entry,
    File,
    Manifest,
    Part,
    complete,
    folder_name,
    leftovers,
)
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
) -> Path:
    """Write one checkpoint; every rank calls it with the same `manifest` (without files and tensors).

    Returns the complete folder. Raises SaveFailed in every rank if any rank could not write; the temporary folder is
    then removed.
    """
    progress = manifest.progress
    final = checkpoints / folder_name(progress.step)
    temporary = checkpoints / f"{final.name}.tmp-{progress.generation}"
    problem = _attempt(lambda: _write_rank(temporary, list(pieces), rank))
    if agree(problem is None):
        raise _abandon(temporary, problem, rank)
    if rank == 0:
        problem = _attempt(lambda: _commit(temporary, final, manifest, world_size))
    if agree(problem is None):
        raise _abandon(temporary, problem, rank)
    return final


def _attempt(work: Callable[[], None]) -> str | None:
    # The others are told, whatever it was: one that is silent would leave them waiting.
    try:
        work()
    except (OSError, ValueError, KeyError, TypeError) as error:
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
    name = f"rank-{rank:05d}.safetensors"
    size, digest = write_safetensors(folder / name, [(p.key, p.tensor) for p in pieces])
    index = {
        "file": asdict(File(name, size, digest)),
        "pieces": [
            {
                "key": p.key,
                "shape": p.whole,
                "dtype": str(p.tensor.dtype).removeprefix("torch."),
                "offsets": p.box.offsets,
                "sizes": p.box.sizes,
            }
            for p in pieces
        ],
    }
    # The other ranks' parts reach the manifest through the folder they all write to: no pickled object travels.
    atomic.write_json(folder / f"index-{rank:05d}.json", index)


def _commit(temporary: Path, final: Path, manifest: Manifest, world_size: int) -> None:
    files: list[File] = []
    tensors: dict[str, Entry] = {}
    indices = [temporary / f"index-{rank:05d}.json" for rank in range(world_size)]
    for path in indices:
        index = json.loads(path.read_text(encoding="utf-8"))
        file = File(**index["file"])
        files.append(file)
        for piece in index["pieces"]:
            entry = tensors.setdefault(piece["key"], Entry(tuple(piece["shape"]), piece["dtype"]))
            entry.parts.append(Part(file.file, tuple(piece["offsets"]), tuple(piece["sizes"])))
    for path in indices:
        path.unlink()
    for key, entry in tensors.items():
        entry.check(key)
    if final.exists():
        # A start takes or sets aside the newest checkpoint, so this step cannot have been saved before.
        raise FileExistsError(17, "exists already", str(final))
    atomic.write_text(temporary / MANIFEST, replace(manifest, files=files, tensors=tensors).to_text())
    os.rename(temporary, final)
    atomic.fsync_folder(final.parent)
    # The folder's name made it complete; `latest` is for people, and must not make a failure of it.
    with contextlib.suppress(OSError):
        atomic.write_text(final.parent / LATEST, final.name + "\n")


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
