"""What checkpoints there are and whether they are what they should be: for whoever looks at a run from outside.

Without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seatrial.base.errors import SeatrialError
from seatrial.base.files import parse_toml, read_text
from seatrial.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    OtherVersion,
    Progress,
    read_manifest,
    step_of,
)
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.checkpoint.source import FolderSource
from seatrial.checkpoint.verified import VerifiedFiles
from seatrial.job.schema import CheckpointSection
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote
from seatrial.storage.names import FILE

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights

# verified       every byte was read from the storage and compared: when it was written, later, or just now
# not verified   complete, and not read since it was written
# damaged        something differs from its manifest
# other version  whole, and written by a Seatrial whose checkpoints this one does not read
State = Literal["verified", "not verified", "damaged", "other version"]
Role = Literal["main", "fallback"]

Count = Callable[[int], None]  # bytes that were compared


class InPlace:
    """A checkpoint of a run, in the place where the run keeps them."""

    def __init__(self, place: Place, step: int) -> None:
        self.place, self.step = place, step
        self.where = place.where(step)

    def manifest(self) -> Manifest:
        """Raises Damaged, OtherVersion, StorageError."""
        return self.place.manifest(self.step)

    def verify(self, part: int, parts: int, stop: Callable[[], bool] | None) -> None:
        """Compare every `parts`-th file, from the `part`-th on; as `Place.verify`."""
        self.place.verify(self.step, part, parts, stop=stop)

    def was_verified(self) -> bool:
        """Whether somebody has read all of it."""
        return self.place.is_verified(self.step)

    def open(self) -> CheckpointWeights:
        """To read from. Loads torch."""
        return self.place.open(self.step)


class InFolder:
    """A checkpoint's folder by itself, whatever it is called: a copy, or one that was set aside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def manifest(self) -> Manifest:
        """Raises Damaged, OtherVersion."""
        return read_manifest(self.folder)

    def verify(self, part: int, parts: int, stop: Callable[[], bool] | None) -> None:
        """Compare every `parts`-th file, from the `part`-th on."""
        files = VerifiedFiles(FolderSource(self.folder), self.manifest().files)
        try:
            files.verify(part, parts, stop=stop)
        finally:
            files.close()

    def was_verified(self) -> bool:
        """Whether it was read back when it was written. A copy is not what was read."""
        return False

    def open(self) -> CheckpointWeights:
        """To read from. Loads torch."""
        from seatrial.checkpoint.read import CheckpointWeights

        return CheckpointWeights(self.folder)


Checkpoint = InPlace | InFolder


@dataclass(frozen=True)
class Found:
    """One checkpoint as it was found. What only the manifest tells is None or 0 where there is no readable manifest."""

    where: str  # path or address
    state: State
    step: int | None
    bytes: int = 0
    files: int = 0
    chunks: int = 0
    ranks: int | None = None  # that wrote it
    time: float | None = None  # unix seconds when its save began
    progress: Progress | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether a run could go on from it, as far as is known."""
        return self.state in ("verified", "not verified")


def describe(checkpoint: Checkpoint) -> Found:
    """What its manifest says; its files are not read. Raises StorageError."""
    step = checkpoint.step if isinstance(checkpoint, InPlace) else step_of(checkpoint.folder)
    try:
        manifest = checkpoint.manifest()
        verified = checkpoint.was_verified()
    except Damaged as error:
        return Found(checkpoint.where, "damaged", step, problems=[error.message])
    except OtherVersion as error:
        return Found(checkpoint.where, "other version", step, problems=[error.message])
    return _found(checkpoint.where, manifest, "verified" if verified else "not verified")


def examine(checkpoint: Checkpoint, count: Count | None = None) -> Found:
    """Read every file of it and name each that is damaged. Raises StorageError where the storage does not answer."""
    found = replace(describe(checkpoint))
    if not found.usable:
        return found
    manifest = checkpoint.manifest()

    def tick() -> bool:
        # Asked before each chunk; all are equally long but the last of a file.
        if count is not None:
            count(found.bytes // max(1, found.chunks))
        return False

    problems: list[str] = []
    try:
        checkpoint.verify(0, 1, tick)
    except Damaged as error:
        problems.append(error.message)
        # It ended with the first. Whoever has to decide what to do about it wants to know how much is left.
        for part in range(len(manifest.files)):
            try:
                checkpoint.verify(part, len(manifest.files), None)
            except Damaged as another:
                if another.message not in problems:
                    problems.append(another.message)
    return replace(found, state="damaged" if problems else "verified", problems=problems)


def _found(where: str, manifest: Manifest, state: State) -> Found:
    ranks = manifest.layout.get("world_size")
    return Found(
        where=where,
        state=state,
        step=manifest.progress.step,
        bytes=sum(f.bytes for f in manifest.files),
        files=len(manifest.files),
        chunks=sum(len(f.hashes) for f in manifest.files),
        ranks=ranks if type(ranks) is int else None,
        time=manifest.time,
        progress=manifest.progress,
    )


def checkpoint_at(address: str) -> Checkpoint | None:
    """The checkpoint at a path or address; None where there stands something else, or nothing. Raises StorageError."""
    if is_remote(address):
        parent, _, name = address.rstrip("/").rpartition("/")
        step = step_of(Path(name))
        if step is None:
            return None
        place = open_place(parent)
        return InPlace(place, step) if step in place.steps() else None
    path = Path(address.removeprefix(FILE))
    if not path.is_dir():
        return None
    # A folder with such a name is a checkpoint also where its manifest is gone: then it is damaged.
    return InFolder(path) if step_of(path) is not None or (path / MANIFEST).is_file() else None


def place_at(address: str) -> Place | None:
    """A place with checkpoints by itself: an address, or a folder in which at least one lies. Raises StorageError."""
    if not is_remote(address) and not Path(address.removeprefix(FILE)).is_dir():
        return None
    place = open_place(address)
    return place if place.steps() else None


def places_of(folder: RunFolder) -> list[tuple[Role, Place]]:
    """Where a run keeps its checkpoints, as its job.toml says. Raises SeatrialError where an address is none."""
    try:
        job: dict[str, Any] = parse_toml(read_text(folder.job_toml))
    except (OSError, ValueError):  # whoever reads the run's records tells it
        job = {}
    values, name = job.get("checkpoint"), job.get("name")
    values = values if isinstance(values, dict) else {}
    # Not validated: of another version's job only these two matter here.
    section = CheckpointSection.model_construct(
        **{key: values[key] if isinstance(values.get(key), str) else None for key in ("folder", "fallback")}
    )
    name = name if isinstance(name, str) else folder.path.name
    urls = checkpoint_urls(section, name, folder)
    roles: tuple[Role, Role] = ("main", "fallback")
    return [(role, open_place(url)) for role, url in zip(roles, urls, strict=False)]


def mark(checkpoint: Checkpoint) -> str | None:
    """Note beside a checkpoint that all of it was read and is right; why that could not be done, or None."""
    if isinstance(checkpoint, InPlace):
        try:
            checkpoint.place.mark_verified(checkpoint.step)
        except SeatrialError as error:
            return error.message
    return None
