"""Checkpoints in a folder, committed by an atomic rename. The layout is in `manifest.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base import atomic
from seatrial.base.files import read_json
from seatrial.checkpoint.commit import (
    SAVED_AGAIN,
    Fence,
    assemble,
    index_name,
    make_index,
    makes_way,
    part_name,
)
from seatrial.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    VERIFIED,
    Damaged,
    Manifest,
    complete,
    folder_name,
    leftovers,
    named,
    read_manifest,
    step_of,
)
from seatrial.checkpoint.part import Beat, check_whole, describe, mapped, no_beat, read_again, write_file
from seatrial.checkpoint.source import FolderSource
from seatrial.checkpoint.verified import Stop, verify_source
from seatrial.storage.errors import as_storage_error

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights

_BEGUN = re.compile(r"step-[0-9]{8,}\.tmp-([0-9]+)(?:-|$)")  # by a generation
_ASIDE = re.compile(r"step-([0-9]{8,})\.damaged(-[0-9]+)?")
_WHY = "set-aside.txt"  # the reason, in a folder that was quarantined


class LocalPlace:
    """A folder that holds the checkpoints of one run. See `place.Place`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def prepare(self) -> None:
        with as_storage_error("make", self.url):
            self.folder.mkdir(parents=True, exist_ok=True)

    def where(self, step: int) -> str:
        return str(self._final(step))

    # -- what is there

    def steps(self) -> list[int]:
        # Only the rename of a complete folder gives it this name: without a manifest it is damaged, and must be found.
        with as_storage_error("list", self.url):
            return [step for path in named(self.folder) if (step := step_of(path)) is not None]

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self._final(step))

    def open(self, step: int) -> CheckpointWeights:
        from seatrial.checkpoint.read import CheckpointWeights  # with torch, which agents do not load

        return CheckpointWeights(self._final(step))

    def verify(self, step: int, part: int = 0, parts: int = 1, *, stop: Stop | None = None) -> Manifest:
        return verify_source(FolderSource(self._final(step)), self.manifest(step), part, parts, stop=stop)

    def is_verified(self, step: int) -> bool:
        return (self._final(step) / VERIFIED).exists() or self.manifest(step).read_back

    def mark_verified(self, step: int) -> None:
        path = self._final(step) / VERIFIED
        with as_storage_error("mark", str(path)):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            atomic.fsync_folder(path.parent)

    def set_aside_names(self) -> list[str]:
        with as_storage_error("list", self.url):
            return sorted(p.name for p in self._paths() if _ASIDE.fullmatch(p.name))

    # -- writing

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
        folder = self._temporary(step, generation, origin)
        path = folder / part_name(rank)
        with as_storage_error("write", str(path)), mapped(fd, size) as data:
            if expected is not None:
                check_whole(data, expected, f"rank {rank}'s state of step {step} in memory")
            folder.mkdir(exist_ok=True)  # not its parents: must not recreate a removed place half-empty
            (folder / index_name(rank)).unlink(missing_ok=True)
            file = describe(path.name, data)
            write_file(path, data, beat)
            if read_back:
                read_again(FolderSource(folder), file, beat)
            # The indices reach the manifest through the folder that all ranks write to: no pickled object is sent.
            content = make_index(file, index["pieces"], read_back=read_back)
            atomic.write_text(folder / index_name(rank), json.dumps(content, separators=(",", ":")))

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
        final = self._final(step)
        with as_storage_error("complete", str(final)):
            return commit(self._temporary(step, generation, origin), final, manifest, world_size, fence)

    def abandon(self, step: int, generation: int) -> None:
        _discard(self._temporary(step, generation, ""))

    # -- removing

    def set_aside(self, step: int, why: str) -> str:
        folder = self._final(step)
        with as_storage_error("quarantine", str(folder)):
            return set_aside(folder, why).name

    def remove(self, step: int) -> str:
        folder = self._final(step)
        with as_storage_error("remove", str(folder)):
            # A crash during the deletion must leave a leftover, not a damaged checkpoint.
            doomed = folder.with_name(f"{folder.name}.tmp-removed-{secrets.token_hex(4)}")
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
        return folder.name

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        with as_storage_error("clean up", self.url):
            found = leftovers(self.folder)
        if before is not None:
            found = [path for path in found if (m := _BEGUN.match(path.name)) and int(m[1]) < before]
        for path in found:
            _discard(path)
        return [path.name for path in found]

    # -- names

    def _final(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def _temporary(self, step: int, generation: int, origin: str) -> Path:
        more = f"-{origin}" if origin else ""
        return self.folder / f"{folder_name(step)}.tmp-{generation}{more}"

    def _paths(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from self.folder.iterdir()


def _discard(path: Path) -> None:
    """Remove an incomplete save. Renamed first: a concurrent rename to the final name gets all of it, or fails."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path
    if ".tmp-removed-" not in path.name:
        doomed = path.with_name(f"{path.name.partition('.tmp-')[0]}.tmp-removed-{secrets.token_hex(4)}")
        try:
            os.rename(path, doomed)
        except OSError:
            return
    shutil.rmtree(doomed, ignore_errors=True)


def commit(temporary: Path, final: Path, manifest: Manifest, world_size: int, fence: Fence) -> Manifest:
    """Publish `temporary`, which has the parts of all ranks, as the complete checkpoint `final`; its manifest.

    `manifest` comes without files and tensors: those are in the indices. Raises OSError; ValueError if the parts do not
    cover every tensor; Damaged if one is missing; Superseded, checked again right before the folder is renamed.
    """
    fence()
    indices = [temporary / index_name(rank) for rank in range(world_size)]
    manifest = assemble(manifest, [_read_index(path) for path in indices])
    taken = final.exists()
    if taken and not makes_way(lambda: read_manifest(final), manifest):
        raise FileExistsError(17, "exists already", str(final))
    for path in indices:
        path.unlink()
    atomic.write_text(temporary / MANIFEST, manifest.to_text())
    fence()  # the write may have taken so long that this generation has been superseded meanwhile
    if taken:
        set_aside(final, SAVED_AGAIN)
    os.rename(temporary, final)
    atomic.fsync_folder(final.parent)
    # The rename made it complete; `latest` is for people, and must not turn success into a failure.
    with contextlib.suppress(OSError):
        atomic.write_text(final.parent / LATEST, final.name + "\n")
    return manifest


def _read_index(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing: the part of that rank is absent") from None
    return content


def set_aside(folder: Path, why: str = "") -> Path:
    """Rename a checkpoint to `NAME.damaged`, so that it is kept but never selected; its new path."""
    aside = folder.with_name(f"{folder.name}.damaged")
    n = 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.damaged-{n}")
    os.rename(folder, aside)
    latest = folder.parent / LATEST
    left = complete(folder.parent)
    # The rest is for people: best effort.
    with contextlib.suppress(OSError):
        if left:
            atomic.write_text(latest, left[0].name + "\n")
        else:
            latest.unlink(missing_ok=True)
        if why:
            (aside / _WHY).write_text(why + "\n", encoding="utf-8")
    return aside
