"""Where a run's checkpoints are: a folder or an object store, with the same guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from seatrial.checkpoint.commit import Fence
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Manifest
from seatrial.checkpoint.object_place import ObjectPlace
from seatrial.checkpoint.part import Beat, no_beat
from seatrial.checkpoint.retention import Stop
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote, join, open_store
from seatrial.storage.names import FILE

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights
    from seatrial.job.schema import CheckpointSection

__all__ = ["LocalPlace", "ObjectPlace", "Place", "checkpoint_urls", "open_place"]


class Place(Protocol):
    """The checkpoints of one run in one storage, by their step.

    Everything raises StorageError, with its kind (full, denied, unreachable, ...) and the address, where the storage
    does not do what it was asked to. Damaged means that the storage works, and a checkpoint is not what it should be.
    """

    url: str

    def prepare(self) -> None:
        """Make it ready to be written to, or say why it cannot be."""
        ...

    def where(self, step: int) -> str:
        """The address of one checkpoint, for people."""
        ...

    def steps(self) -> list[int]:
        """Of all complete checkpoints, newest first; not verified here. A place that is not there has none."""
        ...

    def manifest(self, step: int) -> Manifest:
        """Raises Damaged, OtherVersion."""
        ...

    def open(self, step: int) -> CheckpointWeights:
        """A checkpoint to read; whoever reads verifies. Loads torch. Raises Damaged, OtherVersion."""
        ...

    def verify(self, step: int, part: int = 0, parts: int = 1, *, stop: Stop | None = None) -> Manifest:
        """Compare every `parts`-th file, from the `part`-th on, with the manifest. Raises Damaged, OtherVersion.

        Where `stop` gives true in the midst of it, `verified.Stopped` is raised.
        """
        ...

    def is_verified(self, step: int) -> bool:
        """Whether it was read back when it was written, or verified since. Raises Damaged."""
        ...

    def mark_verified(self, step: int) -> None:
        """Note that somebody has read all of it, and found it to be what the manifest says."""
        ...

    def confirm(self, step: int, stop: Stop | None = None) -> None:
        """`verify` all of it, then `mark_verified`."""
        ...

    def set_aside_names(self) -> list[str]:
        """What `set_aside` has returned."""
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

        `index`: {"pieces": [...]}, see `commit.make_index`. `read_back`: then read it from the storage and compare.
        `origin` tells apart what ranks write and what agents write of the same step and generation. `expected`: the hash
        that all of the memory must have. Damaged where one of these comparisons fails.
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

        Raises Superseded, and then nothing was published; ValueError, KeyError or TypeError where the parts are not all
        of every tensor.
        """
        ...

    def abandon(self, step: int, generation: int, *, origin: str = "") -> None:
        """Remove what was written of a checkpoint that will not be completed, as far as that can be done."""
        ...

    def set_aside(self, step: int, why: str) -> str:
        """Have a checkpoint kept, but never chosen or removed; its new name."""
        ...

    def remove(self, step: int) -> str:
        """Delete a checkpoint; its name. A death in the midst of it leaves what `remove_leftovers` removes."""
        ...

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        """Remove what saves and removals that died have left; their names. Only while nobody writes.

        With `before` only what generations before that one had begun to save, whoever writes meanwhile.
        """
        ...

    def remove_old(
        self, keep: int, keep_every: int = 0, *, sure: int | None = None, stop: Stop | None = None
    ) -> list[str]:
        """`retention.retire`; the names of what was removed."""
        ...


def open_place(url: str) -> Place:
    """The place at `url`, a path or s3://BUCKET/PREFIX. Nothing is asked of it yet. Raises InputError."""
    if is_remote(url):
        return ObjectPlace(open_store(url))
    return LocalPlace(Path(url.removeprefix(FILE)))


def checkpoint_urls(section: CheckpointSection, name: str, folder: RunFolder) -> list[str]:
    """Where run `name` saves: the first place, and the fallback if there is one."""
    first = str(folder.checkpoints) if section.folder is None else join(section.folder, name)
    return [first] if section.fallback is None else [first, join(section.fallback, name)]
