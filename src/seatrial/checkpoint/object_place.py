"""Checkpoints in an object store, which has no rename: writing the manifest last commits one.

    step-00000500/g7/rank-00000.safetensors   written by generation 7
    step-00000500/g7/index-00000.json         that file's content, until the manifest is written
    step-00000500/manifest.json               its presence makes the checkpoint complete
    step-00000500/verified                    all of it has been read since
    step-00000450/set-aside-1.json            was quarantined: contains its manifest and the reason; never selected
    step-00000450/g7-again1/...               saved once more by generation 7, after that
    latest                                    the newest complete one, for people

Objects that no manifest, current or quarantined, lists are garbage of a save that crashed.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base.errors import SeatrialError
from seatrial.base.files import parse_json
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
    folder_name,
    parse_manifest,
    step_of,
)
from seatrial.checkpoint.part import Beat, check_whole, describe, mapped, no_beat, read_again
from seatrial.checkpoint.source import StoreSource
from seatrial.checkpoint.verified import Stop, verify_source
from seatrial.storage import Readable, StorageError, Store

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights

_REQUESTS = 16  # concurrent: each waits for the network
_BEGUN = re.compile(r"step-[0-9]{8,}/g([0-9]+)(?:-[^/]*)?/")  # by a generation
_ASIDE = "set-aside-"
_PROBE = "writable"


class ObjectPlace:
    """A store that holds the checkpoints of one run. See `place.Place`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url

    def prepare(self) -> None:
        self.store.write(_PROBE, b"")
        self.store.remove([_PROBE])

    def where(self, step: int) -> str:
        return f"{self.url}/{folder_name(step)}"

    # -- what is there

    def steps(self) -> list[int]:
        found = self._named()
        with ThreadPoolExecutor(_REQUESTS) as pool:
            sizes = pool.map(self.store.size, (self._key(step, MANIFEST) for step in found))
            return [step for step, size in zip(found, sizes, strict=True) if size is not None]

    def manifest(self, step: int) -> Manifest:
        where = f"{self.where(step)}/{MANIFEST}"
        try:
            data = self.store.read(self._key(step, MANIFEST))
        except StorageError as error:
            if error.kind == "missing":
                raise Damaged(f"{where} is missing: this checkpoint is not complete") from None
            raise
        return parse_manifest(data.decode("utf-8", "replace"), where, step)

    def open(self, step: int) -> CheckpointWeights:
        from seatrial.checkpoint.read import CheckpointWeights  # with torch, which agents do not load

        return CheckpointWeights(self._source(step), self.manifest(step))

    def verify(self, step: int, part: int = 0, parts: int = 1, *, stop: Stop | None = None) -> Manifest:
        return verify_source(self._source(step), self.manifest(step), part, parts, stop=stop)

    def is_verified(self, step: int) -> bool:
        return self.store.size(self._key(step, VERIFIED)) is not None or self.manifest(step).read_back

    def mark_verified(self, step: int) -> None:
        self.store.write(self._key(step, VERIFIED), b"")

    def set_aside_names(self) -> list[str]:
        names = []
        for step in self._named():
            children = self.store.children(folder_name(step))
            names += [self._key(step, name) for name in children if name.startswith(_ASIDE)]
        return sorted(names)

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
        below = self._below(step, generation, origin)
        with mapped(fd, size) as data:
            if expected is not None:
                check_whole(data, expected, f"rank {rank}'s state of step {step} in memory")
            file = describe(part_name(rank), data)
        self.store.remove([self._key(step, below + index_name(rank))])
        done = 0

        def progress(arrived: int, _size: int) -> None:
            nonlocal done
            beat(arrived - done)
            done = arrived

        self.store.upload(self._key(step, below + file.file), Readable(fd, size), progress=progress)
        if read_back:
            read_again(self._source(step), replace(file, file=below + file.file), beat)
        content = make_index(file, index["pieces"], read_back=read_back)
        self.store.write(
            self._key(step, below + index_name(rank)), json.dumps(content, separators=(",", ":")).encode()
        )

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
        fence()
        below = self._below(step, generation, origin)
        keys = [self._key(step, below + index_name(rank)) for rank in range(world_size)]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            indices = [parse_json(data) for data in pool.map(self.store.read, keys)]
        manifest = assemble(manifest, indices, below)
        data = manifest.to_text().encode()
        fence()  # reading may have taken so long that this generation has been superseded meanwhile
        try:
            self.store.write(self._key(step, MANIFEST), data, if_absent=True)
        except StorageError as error:
            if error.kind != "exists" or not makes_way(lambda: self.manifest(step), manifest):
                raise
            self.set_aside(step, SAVED_AGAIN)
            fence()
            self.store.write(self._key(step, MANIFEST), data, if_absent=True)
        try:
            self.store.write(LATEST, (folder_name(step) + "\n").encode())
            self.store.remove(keys)
        except StorageError:  # the checkpoint is complete regardless, and the next start removes the indices
            pass
        return manifest

    def abandon(self, step: int, generation: int) -> None:
        try:
            below = self._key(step, self._below(step, generation, ""))
            kept = self._kept(step)
            self.store.remove([e.name for e in self.store.names(below) if e.name not in kept])
        except SeatrialError:  # the next start does it
            pass

    # -- removing

    def set_aside(self, step: int, why: str) -> str:
        names = {entry.name for entry in self.store.names(folder_name(step))}
        text = self.store.read(self._key(step, MANIFEST)).decode("utf-8", "replace")
        n = 1
        while (name := self._key(step, f"{_ASIDE}{n}.json")) in names:
            n += 1
        try:  # only its own files, not those of a save in progress
            keys = {self._key(step, file.file) for file in self.manifest(step).files}
        except SeatrialError:  # analysing the damage may need everything
            keys = names - self._kept_aside(step)
        content = {"why": why, "keys": sorted(keys), "manifest": text}
        self.store.write(name, json.dumps(content).encode())
        self.store.remove([self._key(step, MANIFEST), self._key(step, VERIFIED)])
        left = self.steps()
        try:
            if left:
                self.store.write(LATEST, (folder_name(left[0]) + "\n").encode())
            else:
                self.store.remove([LATEST])
        except StorageError:  # `latest` is for people: best effort
            pass
        return name

    def remove(self, step: int) -> str:
        kept = self._kept_aside(step)
        # The manifest first: a crash in between must leave garbage, not a damaged checkpoint.
        self.store.remove([self._key(step, MANIFEST)])
        self.store.remove([e.name for e in self.store.names(folder_name(step)) if e.name not in kept])
        return folder_name(step)

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        removed = []
        for step in self._named():
            kept = self._kept(step)
            left = [e.name for e in self.store.names(folder_name(step)) if e.name not in kept]
            if before is not None:
                left = [name for name in left if (m := _BEGUN.match(name)) and int(m[1]) < before]
            self.store.remove(left)
            if left:
                removed.append(f"{folder_name(step)} ({len(left)} objects)")
        return removed if before is not None else removed + self.store.remove_leftovers()

    # -- keys

    def _key(self, step: int, name: str) -> str:
        return f"{folder_name(step)}/{name}"

    def _below(self, step: int, generation: int, origin: str) -> str:
        """The key prefix of a save's files, distinct from those of all complete checkpoints, current or quarantined.

        The same generation may save a step again, after a rollback. Quarantining one does not change the count.
        """
        name = f"g{generation}-{origin}" if origin else f"g{generation}"
        children = self.store.children(folder_name(step))
        before = sum(child == MANIFEST or child.startswith(_ASIDE) for child in children)
        return f"{name}-again{before}/" if before else f"{name}/"

    def _source(self, step: int) -> StoreSource:
        return StoreSource(self.store, folder_name(step))

    def _named(self) -> list[int]:
        """Steps that have any object, newest first."""
        steps = [step_of(Path(name)) for name in self.store.children()]
        return sorted((step for step in steps if step is not None), reverse=True)

    def _kept(self, step: int) -> set[str]:
        """Keys of a step that a manifest lists, current or quarantined, and the manifests themselves."""
        kept = self._kept_aside(step)
        if self.store.size(self._key(step, MANIFEST)) is None:
            return kept
        kept |= {self._key(step, MANIFEST), self._key(step, VERIFIED)}
        try:
            return kept | {self._key(step, file.file) for file in self.manifest(step).files}
        except SeatrialError:  # analysing the damage may need everything
            return {entry.name for entry in self.store.names(folder_name(step))}

    def _kept_aside(self, step: int) -> set[str]:
        kept: set[str] = set()
        for child in self.store.children(folder_name(step)):
            if child.startswith(_ASIDE):
                key = self._key(step, child)
                try:
                    kept |= {key, *parse_json(self.store.read(key))["keys"]}
                except (ValueError, KeyError, TypeError):
                    kept.add(key)
        return kept
