"""The content of a checkpoint folder: the manifest that makes it complete, and the names of folders.

    checkpoints/
      step-00000500/            complete: it has manifest.json, and only a rename gives a folder this name
        rank-00000.safetensors  what rank 0 owned: `model/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `rng/cpu/0`;
                                once per checkpoint `optimizer/updates`, the number of optimizer updates
        manifest.json           step, data position, each file's size and hashes, where each box of each tensor is
        verified                all of it has been read since, and matched the manifest
      step-00001000.tmp-7/      being written by generation 7, or left by its crash: removed by the next start
      step-00000450.damaged/    failed its verification and was quarantined
      latest                    the name of the newest complete folder

Files are safetensors and JSON: nothing in a checkpoint can run code when it is read. In an object store the same names
are keys, see `object_place.py`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seatrial.base.box import Box
from seatrial.base.errors import RunFailed, SeatrialError
from seatrial.base.files import NotAFile, parse_json, read_text
from seatrial.checkpoint.hashing import HEX_DIGITS
from seatrial.storage.errors import StorageError, from_os_error

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
LATEST = "latest"
VERIFIED = "verified"
# At most one folder deep: in an object store each generation writes under its own key prefix.
_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH = re.compile(rf"[0-9a-f]{{{HEX_DIGITS}}}")
_COMPLETE = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
# Saves and removals in progress, and `latest` before its rename.
_TEMPORARY = re.compile(r"step-[0-9]{8,}\.tmp-.+|\.latest\.[0-9]+\.tmp")


class Damaged(SeatrialError):
    """A checkpoint does not match its manifest; the message names the file and both hashes or sizes."""


class OtherVersion(RunFailed):
    """An intact checkpoint in a version that this Seatrial does not read; not damaged, so never quarantined."""


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    file: str
    bytes: int
    chunk_bytes: int
    hashes: list[str]  # XXH3-128 of each chunk of `chunk_bytes`; the last may be shorter

    def check(self) -> None:
        """Raise ValueError unless this is a valid description of a file."""
        if not isinstance(self.file, str) or not _FILE.fullmatch(self.file):
            raise ValueError(f"{self.file!r} is not the name of a file in this folder")
        if type(self.bytes) is not int or type(self.chunk_bytes) is not int:
            raise ValueError(f"{self.file}: its sizes are not integers")
        if self.bytes < 0 or self.chunk_bytes < 1:
            raise ValueError(f"{self.file}: {self.bytes} bytes in chunks of {self.chunk_bytes}")
        if len(self.hashes) != -(-self.bytes // self.chunk_bytes):
            raise ValueError(
                f"{self.file}: {len(self.hashes)} hashes for {self.bytes} bytes in chunks of {self.chunk_bytes}"
            )
        if any(not isinstance(text, str) or not _HASH.fullmatch(text) for text in self.hashes):
            raise ValueError(f"{self.file}: one of its hashes is malformed")


@dataclass(frozen=True)
class Part:
    """The location of one box of a tensor."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


@dataclass
class Entry:
    """One whole tensor: its shape, its dtype, and the boxes that make it up."""

    shape: tuple[int, ...]
    dtype: str  # torch's name: "float32"
    parts: list[Part] = field(default_factory=list)

    def check(self, key: str) -> None:
        """Raise ValueError unless the parts lie inside the shape, do not overlap, and cover it."""
        whole = Box.whole(self.shape)
        if any(part.box.intersect(whole) != part.box for part in self.parts):
            raise ValueError(f"{key} has a part outside its shape {self.shape}")
        if sum(part.box.numel for part in self.parts) != whole.numel:
            raise ValueError(f"{key}: its parts do not have as many values as its shape {self.shape}")
        # With the right number of values and no overlap, nothing is missing.
        corners = sorted(self.parts, key=lambda part: part.offsets)
        for i, part in enumerate(corners):
            for other in corners[i + 1 :]:
                if other.offsets and other.offsets[0] >= part.offsets[0] + part.sizes[0]:
                    break
                if part.box.intersect(other.box) is not None:
                    raise ValueError(f"{key} has two parts that overlap")


@dataclass(frozen=True)
class Progress:
    """How far the run has progressed."""

    step: int
    tokens: int
    next_sample: int  # global position in the data order of the first sample not yet trained on
    generation: int


@dataclass
class Manifest:
    """The content of manifest.json."""

    progress: Progress
    time: float
    seed: int
    architecture: dict[str, Any]
    layout: dict[str, Any]
    job_sha256: str
    code: str
    read_back: bool  # every file was read back from the storage, and compared, before this was written
    files: list[File]
    tensors: dict[str, Entry]  # "KIND/NAME"

    def to_text(self) -> str:
        """The content of the file: one line of JSON that contains its own hash."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "progress": asdict(self.progress),
            "time": self.time,
            "seed": self.seed,
            "architecture": self.architecture,
            "layout": self.layout,
            "job_sha256": self.job_sha256,
            "code": self.code,
            "read_back": self.read_back,
            "files": [asdict(f) for f in self.files],
            "tensors": {
                key: {
                    "shape": list(e.shape),
                    "dtype": e.dtype,
                    "parts": [[p.file, list(p.offsets), list(p.sizes)] for p in e.parts],
                }
                for key, e in self.tensors.items()
            },
        }
        return json.dumps({"sha256": _hash(body), **body}, separators=(",", ":")) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """The inverse of `to_text`. Raises KeyError, TypeError or ValueError on anything else.

        OtherVersion if it is an intact manifest of another version.
        """
        body = parse_json(text)
        recorded = body.pop("sha256")
        if recorded != _hash(body):
            raise ValueError(f"its content has sha256 {_hash(body)}, recorded is {recorded}")
        version = body["schema_version"]
        if version != SCHEMA_VERSION:
            raise OtherVersion(
                f"it has schema_version {version}; this Seatrial reads {SCHEMA_VERSION}",
                hint=f"read it with the version that wrote it ({body.get('code', 'unknown')}): its `seatrial export` "
                "makes a Hugging Face folder of it, for model.init_from",
            )
        files = [File(**f) for f in body["files"]]
        for file in files:
            file.check()
        names = {f.file for f in files}
        if len(names) != len(files):
            raise ValueError("a file is listed twice")
        if type(body["read_back"]) is not bool:
            raise ValueError("read_back is neither true nor false")
        tensors = {}
        for key, e in body["tensors"].items():
            parts = [Part(file, tuple(offsets), tuple(sizes)) for file, offsets, sizes in e["parts"]]
            # Only hashed files are read.
            stray = next((part.file for part in parts if part.file not in names), None)
            if stray is not None:
                raise ValueError(f"{key} is in {stray!r}, which is not among the files")
            tensors[key] = Entry(tuple(e["shape"]), e["dtype"], parts)
            tensors[key].check(key)
        progress = Progress(**body["progress"])
        if any(type(value) is not int or value < 0 for value in asdict(progress).values()):
            raise ValueError(f"the progress {progress} is not made of counts")
        if progress.step == 0:
            raise ValueError("step 0 does not exist")
        return cls(
            progress=progress,
            time=body["time"],
            seed=body["seed"],
            architecture=body["architecture"],
            layout=body["layout"],
            job_sha256=body["job_sha256"],
            code=body["code"],
            read_back=body["read_back"],
            files=files,
            tensors=tensors,
        )


def _hash(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def folder_name(step: int) -> str:
    """The name of a complete checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a complete checkpoint's folder, from its name; None for any other name."""
    match = _COMPLETE.fullmatch(folder.name)
    return int(match[1]) if match else None


def named(checkpoints: Path) -> list[Path]:
    """Folders with a complete checkpoint's name, newest step first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if step_of(p) is not None]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


def complete(checkpoints: Path) -> list[Path]:
    """Folders that have a manifest, newest step first. Their content is not verified."""
    return [p for p in named(checkpoints) if (p / MANIFEST).is_file()]


def leftovers(checkpoints: Path) -> list[Path]:
    """Leftovers of saves and removals that crashed: never a complete checkpoint."""
    if not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if _TEMPORARY.fullmatch(p.name))


# An unreadable sector means the file is lost. No other storage error justifies quarantining a checkpoint.
_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)


def lost_or_refused(path: Path, error: OSError) -> Damaged | StorageError:
    """The exception for an existing checkpoint file that cannot be read: Damaged if lost, else StorageError."""
    if error.errno in _LOST or isinstance(error, NotAFile):
        return Damaged(f"{path} cannot be read: {error.strerror}")
    return from_os_error("read", str(path), error)


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json; Damaged if it is missing or not a manifest, OtherVersion if another version wrote it.

    StorageError if it cannot be read, which implies nothing about its content.
    """
    path = folder / MANIFEST
    try:
        text = read_text(path, links=True)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path} is missing: this checkpoint is not complete") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} is not a checkpoint manifest: {error!r}") from None
    except OSError as error:
        raise lost_or_refused(path, error) from None
    return parse_manifest(text, str(path), step_of(folder))


def parse_manifest(text: str, where: str, step: int | None) -> Manifest:
    """Parse the manifest found at `where`, a path or an address; `step` is the step in its folder's name.

    Raises Damaged and OtherVersion, which name `where`.
    """
    try:
        manifest = Manifest.from_text(text)
    except OtherVersion as error:
        raise OtherVersion(f"{where}: {error.message}", hint=error.hint) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{where} is not a checkpoint manifest: {error!r}") from None
    if step not in (None, manifest.progress.step):
        raise Damaged(f"{where} is of step {manifest.progress.step}, not of the step in its folder's name")
    return manifest
