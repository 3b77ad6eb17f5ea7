"""The storage of a run's checkpoints: a folder or an object store, with the same guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from seatrial.checkpoint.commit import Fence
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Manifest
from seatrial.checkpoint.object_place import ObjectPlace
from seatrial.checkpoint.part import Beat, no_beat
from seatrial.checkpoint.verified import Stop
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote, join, open_store
from seatrial.storage.names import FILE

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights
    from seatrial.job.schema import CheckpointSection

__all__ = ["LocalPlace", "ObjectPlace", "Place", "checkpoint_urls", "open_place"]


class Place(Protocol):
    """The checkpoints of one run in one storage, by their step.

    Every method raises StorageError, with its kind (full, denied, unreachable, ...) and the address, if the storage
    fails a request. Damaged means that the storage works, but a checkpoint does not match its manifest.
    """

    url: str

    def prepare(self) -> None:
        """Make it writable, or raise the reason why it is not."""
        ...

    def where(self, step: int) -> str:
        """The address of one checkpoint, for display."""
        ...

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, newest first; not verified. A place that does not exist has none."""
        ...

    def manifest(self, step: int) -> Manifest:
        """The manifest of one checkpoint. Raises Damaged, OtherVersion."""
        ...

    def open(self, step: int) -> CheckpointWeights:
        """A checkpoint to read; reading verifies it. Loads torch. Raises Damaged, OtherVersion."""
        ...

    def verify(self, step: int, part: int = 0, parts: int = 1, *, stop: Stop | None = None) -> Manifest:
        """Compare every `parts`-th file, starting with the `part`-th, with the manifest. Raises Damaged, OtherVersion.

        Raises `verified.Stopped` as soon as `stop` returns true.
        """
        ...

    def is_verified(self, step: int) -> bool:
        """Whether it was read back after writing, or verified since. Raises Damaged."""
        ...

    def mark_verified(self, step: int) -> None:
        """Record that all of it was read and matched the manifest."""
        ...

    def set_aside_names(self) -> list[str]:
        """Names that `set_aside` has returned."""
        ...

    def put_part(
        self,
        step: int,
        generation: int,
        rank: int,
        fd: int,
        size: int,
        index: dict[str, Any],
        read_back: bool,
        *,
        origin: str = "",
        expected: str | None = None,
        beat: Beat = no_beat,
    ) -> None:
        """Write the first `size` bytes of the memory file `fd` as the part of `rank`, durably.

        `index`: {"pieces": [...]}, see `commit.make_index`. `read_back`: read it back from the storage and compare.
        `origin` distinguishes what agents write from what ranks write for the same step and generation. `expected`: the
        hash that all of the memory must have. Damaged if one of these comparisons fails.
        """
        ...

    def commit(
        self,
        step: int,
        generation: int,
        manifest: Manifest,
        world_size: int,
        fence: Fence,
        *,
        origin: str = "",
    ) -> Manifest:
        """Make the parts of all ranks one complete checkpoint; its manifest. `manifest` has no files and tensors yet.

        Raises Superseded, and then nothing was published; ValueError, KeyError or TypeError if the parts do not cover
        every tensor.
        """
        ...

    def abandon(self, step: int, generation: int) -> None:
        """Remove the files of a checkpoint that will not be completed, best effort."""
        ...

    def set_aside(self, step: int, why: str) -> str:
        """Keep a checkpoint, but never select or remove it; its new name."""
        ...

    def remove(self, step: int) -> str:
        """Delete a checkpoint; its name. A crash in between leaves what `remove_leftovers` removes."""
        ...

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        """Remove the leftovers of saves and removals that crashed; their names. Only while nothing is being written.

        With `before`, only saves begun by generations before that one; then others may be writing.
        """
        ...


def open_place(url: str) -> Place:
    """The place at `url`, a path or s3://BUCKET/PREFIX. Does not access it yet. Raises InputError."""
    if is_remote(url):
        return ObjectPlace(open_store(url))
    return LocalPlace(Path(url.removeprefix(FILE)))


def checkpoint_urls(section: CheckpointSection, name: str, folder: RunFolder) -> list[str]:
    """Addresses that run `name` saves to: the main place, and the fallback if there is one."""
    first = str(folder.checkpoints) if section.folder is None else join(section.folder, name)
    return [first] if section.fallback is None else [first, join(section.fallback, name)]
