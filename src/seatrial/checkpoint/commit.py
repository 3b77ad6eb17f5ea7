"""Commit the parts of all ranks as one complete checkpoint. Without torch: an agent can do it for dead ranks.

A part is a file `rank-RRRRR.safetensors` and an `index-RRRRR.json` next to it that lists the boxes it contains.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import seatrial
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import Damaged, Entry, File, Manifest, Part, Progress
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:  # spares agents the imports that reading job files needs
    from seatrial.job import Job
    from seatrial.job.layout import Layout

Fence = Callable[[], None]


class Superseded(SeatrialError):
    """A later generation has begun: this one may no longer publish anything."""


def fence(folder: RunFolder, generation: int) -> Fence:
    """A check that raises Superseded once any generation later than `generation` has ever begun in `folder`."""

    def check() -> None:
        last = folder.last_generation()
        if last < generation:
            raise Superseded(
                f"generation {generation} cannot see the run folder {folder.path}, and so not whether a later generation has begun"
            )
        if last > generation:
            raise Superseded(f"generation {last} has begun: generation {generation} publishes no checkpoint")

    return check


def part_name(rank: int) -> str:
    """The file of `rank` in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """The index of `rank`'s file; read only until the manifest is written."""
    return f"index-{rank:05d}.json"


def make_index(file: File, pieces: list[dict[str, Any]], *, read_back: bool) -> dict[str, Any]:
    """The content of an index.

    A piece is {"key", "shape", "dtype", "offsets", "sizes"}. One with "owner": false is a copy of what another rank
    saves: it is in the file but not in the manifest; with "stands_in" it is saved if that replica is lost. `read_back`:
    the file was read back and compared.
    """
    return {"file": asdict(file), "read_back": read_back, "pieces": pieces}


def for_replica(index: dict[str, Any], *, owns: bool) -> dict[str, Any]:
    """Convert a snapshot's index for the rank of a lost replica that held the same state.

    `owns`: that rank is in the first replica, which saves weights and optimizer state for all. The random state in the
    file remains that of the rank that wrote it.
    """
    pieces = [
        {**piece, "owner": owns and piece["stands_in"] and not piece["key"].startswith("rng/")}
        for piece in index["pieces"]
    ]
    return {**index, "pieces": pieces}


def assemble(manifest: Manifest, indices: Iterable[dict[str, Any]], below: str = "") -> Manifest:
    """`manifest` with the files and tensors of `indices`; the files are in the folder `below` of the checkpoint.

    Raises ValueError, KeyError or TypeError if the parts do not cover every tensor.
    """
    files: list[File] = []
    tensors: dict[str, Entry] = {}
    read_back = True
    for index in indices:
        file = File(**index["file"])
        file = replace(file, file=below + file.file)
        file.check()
        files.append(file)
        read_back = read_back and index["read_back"] is True
        for piece in index["pieces"]:
            if piece.get("owner", True):
                entry = tensors.setdefault(piece["key"], Entry(tuple(piece["shape"]), piece["dtype"]))
                entry.parts.append(Part(file.file, tuple(piece["offsets"]), tuple(piece["sizes"])))
    for key, entry in tensors.items():
        entry.check(key)
    return replace(manifest, files=files, tensors=tensors, read_back=read_back)


SAVED_AGAIN = "this step was saved again"


def makes_way(read: Callable[[], Manifest], manifest: Manifest) -> bool:
    """Whether the checkpoint whose manifest `read` returns yields to that of `manifest`, which has the same step.

    A start resumes from the newest checkpoint or quarantines it, and a rollback quarantines later ones. If the storage
    was unreachable then and has since recovered, its checkpoint is of an abandoned trajectory. What a later generation
    saved must not be touched.
    """
    try:
        return read().progress.generation <= manifest.progress.generation
    except Damaged:
        return True


@cache
def code_version() -> str:
    """Version and hash of Seatrial's own source, so that a checkpoint records which code wrote it."""
    root = Path(seatrial.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{seatrial.__version__}+{digest.hexdigest()[:12]}"


def progress_after(job: Job, step: int, generation: int) -> Progress:
    """The run's progress after `step` steps: each consumes one global batch, whatever the layout."""
    samples = job.train.batches.total(step)
    return Progress(step, samples * job.train.sequence_length, samples, generation)


def new_manifest(job: Job, layout: Layout, progress: Progress) -> Manifest:
    """The manifest of a checkpoint of `job` written by ranks in `layout`; `assemble` adds files and tensors."""
    return Manifest(
        progress=progress,
        time=time.time(),
        seed=job.train.seed,
        architecture=job.architecture.as_dict(),
        layout=layout.as_dict(),
        job_sha256=hashlib.sha256(job.to_toml().encode()).hexdigest(),
        code=code_version(),
        read_back=False,
        files=[],
        tensors={},
    )
