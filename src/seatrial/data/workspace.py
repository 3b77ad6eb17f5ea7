"""The hidden folder in which a token store is made; the work in it survives the process that did it.

.NAME.tmp-work/.lock                flock of the process that works here
.NAME.tmp-work/parts/               parts that are tokenised but not yet in a complete shard (`tokenise.py`)
.NAME.tmp-work/shard-00000.bin ...  shards; those listed in state.json are complete and durable
.NAME.tmp-work/state.json           complete shards, and how far into the parts they reach
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from pydantic import ValidationError

from seatrial.base.atomic import write_text
from seatrial.base.errors import InputError, RunFailed
from seatrial.base.files import open_file, read_bytes
from seatrial.data.manifest import ShardFile
from seatrial.data.parts import Part
from seatrial.data.tokenise import PartResult, drop_part, find_part, sealed, unsealed
from seatrial.data.writer import temporary_prefix

# Called with a message for the user.
Note = Callable[[str], None]

_FORMAT = 1
_LOCK = ".lock"


@dataclass(frozen=True)
class Reached:
    """How far the parts are in the store, and the counts so far."""

    part: int = 0  # the first that is not completely in it
    tokens: int = 0  # of that part that are in it
    lines: int = 0  # of JSONL in the file that the previous part ends in
    read: int = 0  # bytes, decompressed, of that file
    foreign: int = 0  # non-text bytes among them
    empty: int = 0
    replaced: int = 0
    replaced_files: int = 0
    last_replaced: str = ""  # a file cut into parts counts once


@dataclass
class Done:
    """The finished work found in a workspace."""

    reached: Reached = field(default_factory=Reached)
    shards: list[ShardFile] = field(default_factory=list)
    results: dict[int, PartResult] = field(default_factory=dict)  # parts with their files

    @property
    def n_parts(self) -> int:
        """Parts that need not be done again."""
        return self.reached.part + len(self.results)


class Workspace:
    """Context manager: the folder for a store at `out`, locked; removed at the end if nothing in it is worth keeping.

    RunFailed if another process works there; InputError if it cannot be created.
    """

    def __init__(self, out: Path, shard_tokens: int, note: Note | None = None) -> None:
        self.folder = out.parent / f"{temporary_prefix(out)}work"
        self.parts = self.folder / "parts"
        self._out = out
        self._shard_tokens = shard_tokens
        self._lock: IO[str] | None = None
        self.note: Note = (lambda text: None) if note is None else note

    def __enter__(self) -> Workspace:
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._lock = open(
                open_file(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8"
            )
        except OSError as e:
            raise InputError(
                f"cannot write next to {self._out}: {e.strerror}",
                hint="give an --out folder that you may write to",
            ) from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock.seek(0)
            pid = self._lock.read().strip()
            self._lock.close()
            raise RunFailed(
                f"{self._out} is being prepared by {f'process {pid}' if pid else 'another process'}",
                hint="wait for it, or stop it; its finished work is kept",
            ) from e
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        if not self.worth_keeping():
            shutil.rmtree(self.folder, ignore_errors=True)
        elif kind is not None:
            self.note(
                f"finished work is kept in {self.folder}: run the same command to continue, or delete the folder"
            )
        # For the case that the folder has become the store. Not earlier: it must not appear unused before.
        (self._out / _LOCK).unlink(missing_ok=True)
        self._lock.close()

    def worth_keeping(self) -> bool:
        """Whether there is something here that another attempt could resume from."""
        return self._state_file.exists() or any(self.parts.glob("part-*.json"))

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.json"

    def find(self, parts: Sequence[Part]) -> Done:
        """The work of earlier attempts on `parts`. What belongs to other sources, or is damaged, is removed."""
        found = self._complete_shards(parts)
        keep = {_LOCK, "parts", "state.json"}
        for shard in found.shards:
            assert shard.chunks is not None
            keep |= {shard.file, shard.index.file, shard.chunks.file}
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink()
        for part in parts[found.reached.part :]:
            result = find_part(part, self.parts)
            if result is not None:
                found.results[part.number] = result
        names = {f"part-{number:08d}" for number in found.results}
        for path in self.parts.iterdir():
            if path.stem not in names or path.suffix == ".tmp":
                path.unlink()
        return found

    def save(self, parts: Sequence[Part], reached: Reached, shards: Sequence[ShardFile]) -> None:
        """Record that `shards` are complete and reach `reached`; parts that are completely in them are removed."""
        state = {
            "format": _FORMAT,
            "shard_tokens": self._shard_tokens,
            "parts_digest": _digest(parts, reached),
            "reached": asdict(reached),
            "shards": [s.model_dump() for s in shards],
        }
        write_text(self._state_file, sealed(state))
        for path in sorted(self.parts.glob("part-*.json")):
            number = int(path.stem.removeprefix("part-"))
            if number >= reached.part:
                break
            drop_part(number, self.parts)

    def clear_up(self) -> None:
        """Remove everything but the shards: the folder is about to become the store."""
        shutil.rmtree(self.parts)
        self._state_file.unlink(missing_ok=True)

    def _complete_shards(self, parts: Sequence[Part]) -> Done:
        try:
            state = unsealed(read_bytes(self._state_file))
            reached = Reached(**state["reached"])
            shards = [ShardFile.model_validate(s) for s in state["shards"]]
            fits = (
                state["format"] == _FORMAT
                and state["shard_tokens"] == self._shard_tokens
                and reached.part <= len(parts)
                and state["parts_digest"] == _digest(parts, reached)
                and all(self._is_whole(s) for s in shards)
            )
        except FileNotFoundError:
            return Done()
        except (OSError, ValueError, TypeError, KeyError, ValidationError):
            fits = False
        if not fits:
            self._state_file.unlink(missing_ok=True)
            return Done()
        return Done(reached, shards)

    def _is_whole(self, shard: ShardFile) -> bool:
        return shard.chunks is not None and all(
            _sha256(self.folder / file.file) == file.sha256 for file in (shard, shard.index)
        )


def _digest(parts: Sequence[Part], reached: Reached) -> str:
    """Digest of all parts that `reached` reaches into."""
    text = "".join(part.fingerprint for part in parts[: reached.part + 1])
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(open_file(path), "rb", buffering=0) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
