"""Making a folder of parts a complete checkpoint. Without torch: an agent can do it for ranks that are gone.

Every part is a file `rank-RRRRR.safetensors` and an `index-RRRRR.json` beside it that says which boxes are in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import seatrial
from seatrial.base import atomic
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import LATEST, MANIFEST, Entry, File, Manifest, Part, Progress
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:  # an agent starts without what reading job files needs
    from seatrial.job import Job
    from seatrial.job.layout import Layout

Fence = Callable[[], None]


class Superseded(SeatrialError):
    """A later generation has begun: this one may not publish anything any more."""


def fence(folder: RunFolder, generation: int) -> Fence:
    """What raises Superseded as soon as a generation later than `generation` was ever begun in `folder`."""

    def check() -> None:
        last = folder.last_generation()
        if last > generation:
            raise Superseded(f"generation {last} has begun: generation {generation} publishes no checkpoint")

    return check


def part_name(rank: int) -> str:
    """The file of `rank` in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """What says what `rank`'s file holds, until the manifest does."""
    return f"index-{rank:05d}.json"


def make_index(file: File, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of an index.

    A piece is {"key", "shape", "dtype", "offsets", "sizes"}. One with "owner": false is a copy of what another rank
    saves: it is in the file, and not in the manifest.
    """
    return {"file": asdict(file), "pieces": pieces}


def write_index(folder: Path, rank: int, index: dict[str, Any]) -> None:
    """Put `rank`'s index into the folder, durably. Raises OSError."""
    # The ranks' parts reach the manifest through the folder they all write to: no pickled object travels.
    atomic.write_json(folder / index_name(rank), index)


def commit(temporary: Path, final: Path, manifest: Manifest, world_size: int, fence: Fence) -> None:
    """Make `temporary`, which has the parts of all ranks, the complete checkpoint `final`.

    `manifest` comes without files and tensors: those are in the indices. Raises OSError; ValueError where the parts are
    not all of every tensor; Superseded, also at the last moment before the folder gets its name.
    """
    fence()
    files: list[File] = []
    tensors: dict[str, Entry] = {}
    indices = [temporary / index_name(rank) for rank in range(world_size)]
    for path in indices:
        index = json.loads(path.read_text(encoding="utf-8"))
        file = File(**index["file"])
        files.append(file)
        for piece in index["pieces"]:
            if piece.get("owner", True):
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
    fence()  # writing may have taken as long as it takes others to give this generation up
    os.rename(temporary, final)
    atomic.fsync_folder(final.parent)
    # The folder's name made it complete; `latest` is for people, and must not make a failure of it.
    with contextlib.suppress(OSError):
        atomic.write_text(final.parent / LATEST, final.name + "\n")


@cache
def code_version() -> str:
    """Version and hash of Seatrial's own source, so that a checkpoint says which code made it."""
    root = Path(seatrial.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{seatrial.__version__}+{digest.hexdigest()[:12]}"


def progress_after(job: Job, step: int, generation: int) -> Progress:
    """Where the run stands after `step` steps: each has taken one global batch, whatever layout it ran in."""
    samples = step * job.train.global_batch
    return Progress(step, samples * job.train.sequence_length, samples, generation)


def new_manifest(job: Job, layout: Layout, progress: Progress) -> Manifest:
    """The manifest of a checkpoint of `job` written by ranks in `layout`; its files and tensors come with `commit`."""
    return Manifest(
        progress=progress,
        time=time.time(),
        seed=job.train.seed,
        architecture=job.architecture.as_dict(),
        layout=layout.as_dict(),
        job_sha256=hashlib.sha256(job.to_toml().encode()).hexdigest(),
        code=code_version(),
        files=[],
        tensors={},
    )
