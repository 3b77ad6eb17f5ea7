"""List a run's checkpoints and check whether they match their manifests, for tools outside the run.

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
# damaged        something does not match its manifest
# other version  intact, but written by a Seatrial whose checkpoints this one does not read
State = Literal["verified", "not verified", "damaged", "other version"]
Role = Literal["main", "fallback"]

Count = Callable[[int], None]  # bytes that were compared


class InPlace:
    """A checkpoint in its run's place."""

    def __init__(self, place: Place, step: int) -> None:
        self.place, self.step = place, step
        self.where = place.where(step)

    def manifest(self) -> Manifest:
        """The manifest. Raises Damaged, OtherVersion, StorageError."""
        return self.place.manifest(self.step)

    def verify(self, part: int, parts: int, stop: Callable[[], bool] | None) -> None:
        """Compare every `parts`-th file, starting with the `part`-th; as `Place.verify`."""
        self.place.verify(self.step, part, parts, stop=stop)

    def was_verified(self) -> bool:
        """Whether all of it has been read and matched."""
        return self.place.is_verified(self.step)

    def open(self) -> CheckpointWeights:
        """The checkpoint's weights. Loads torch."""
        return self.place.open(self.step)


class InFolder:
    """A checkpoint's folder outside a place, under any name: a copy, or one that was quarantined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)

    def manifest(self) -> Manifest:
        """The manifest. Raises Damaged, OtherVersion."""
        return read_manifest(self.folder)

    def verify(self, part: int, parts: int, stop: Callable[[], bool] | None) -> None:
        """Compare every `parts`-th file, starting with the `part`-th."""
        files = VerifiedFiles(FolderSource(self.folder), self.manifest().files)
        try:
            files.verify(part, parts, stop=stop)
        finally:
            files.close()

    def was_verified(self) -> bool:
        """Always false: even if the original was read back when it was written, a copy was not."""
        return False

    def open(self) -> CheckpointWeights:
        """The checkpoint's weights. Loads torch."""
        from seatrial.checkpoint.read import CheckpointWeights

        return CheckpointWeights(self.folder)


Checkpoint = InPlace | InFolder


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint as found. Without a readable manifest, the fields that only it contains are None or 0."""

    where: str  # path or address
    state: State
    step: int | None
    bytes: int = 0
    files: int = 0
    chunks: int = 0
    ranks: int | None = None  # number of ranks that wrote it
    time: float | None = None  # unix seconds when its save began
    progress: Progress | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether a run could resume from it, if known."""
        return self.state in ("verified", "not verified")


def describe(checkpoint: Checkpoint) -> CheckpointReport:
    """Describe a checkpoint from its manifest; its files are not read. Raises StorageError."""
    step = checkpoint.step if isinstance(checkpoint, InPlace) else step_of(checkpoint.folder)
    try:
        manifest = checkpoint.manifest()
        verified = checkpoint.was_verified()
    except Damaged as error:
        return CheckpointReport(checkpoint.where, "damaged", step, problems=[error.message])
    except OtherVersion as error:
        return CheckpointReport(checkpoint.where, "other version", step, problems=[error.message])
    return _report_of(checkpoint.where, manifest, "verified" if verified else "not verified")


def examine(checkpoint: Checkpoint, count: Count | None = None) -> CheckpointReport:
    """Read every file of it and report each that is damaged. Raises StorageError if the storage does not answer."""
    found = replace(describe(checkpoint))
    if not found.usable:
        return found
    manifest = checkpoint.manifest()

    def tick() -> bool:
        # Called before each chunk; all have the same length except the last of a file.
        if count is not None:
            count(found.bytes // max(1, found.chunks))
        return False

    problems: list[str] = []
    try:
        checkpoint.verify(0, 1, tick)
    except Damaged as error:
        problems.append(error.message)
        # It stopped at the first. Deciding what to do about it requires knowing how much is intact.
        for part in range(len(manifest.files)):
            try:
                checkpoint.verify(part, len(manifest.files), None)
            except Damaged as another:
                if another.message not in problems:
                    problems.append(another.message)
    return replace(found, state="damaged" if problems else "verified", problems=problems)


def _report_of(where: str, manifest: Manifest, state: State) -> CheckpointReport:
    ranks = manifest.layout.get("world_size")
    return CheckpointReport(
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
    """The checkpoint at a path or address; None if something else, or nothing, is there. Raises StorageError."""
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
        # A folder with such a name is a checkpoint even if its manifest is missing: then it is damaged.
    return InFolder(path) if step_of(path) is not None or (path / MANIFEST).is_file() else None


def place_at(address: str) -> Place | None:
    """The place at an address or folder, if it contains at least one checkpoint. Raises StorageError."""
    if not is_remote(address) and not Path(address.removeprefix(FILE)).is_dir():
        return None
    place = open_place(address)
    return place if place.steps() else None


def places_of(folder: RunFolder) -> list[tuple[Role, Place]]:
    """The places of a run's checkpoints, from its job.toml. Raises SeatrialError if an address is invalid."""
    try:
        job: dict[str, Any] = parse_toml(read_text(folder.job_toml))
    except (OSError, ValueError):  # reported by the code that reads the run's records
        job = {}
    values, name = job.get("checkpoint"), job.get("name")
    values = values if isinstance(values, dict) else {}
    # Not validated: only these two keys matter, even in a job file of another version.
    section = CheckpointSection.model_construct(
        **{key: values[key] if isinstance(values.get(key), str) else None for key in ("folder", "fallback")}
    )
    name = name if isinstance(name, str) else folder.path.name
    urls = checkpoint_urls(section, name, folder)
    roles: tuple[Role, Role] = ("main", "fallback")
    return [(role, open_place(url)) for role, url in zip(roles, urls, strict=False)]


def mark(checkpoint: Checkpoint) -> str | None:
    """Record next to a checkpoint that all of it was read and matched; the reason if that failed, else None."""
    if isinstance(checkpoint, InPlace):
        try:
            checkpoint.place.mark_verified(checkpoint.step)
        except SeatrialError as error:
            return error.message
    return None
