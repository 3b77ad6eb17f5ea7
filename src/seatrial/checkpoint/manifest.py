"""What a checkpoint folder holds: the manifest that makes it complete, and the names of folders.

    checkpoints/
      step-00000500/            complete: it has manifest.json, and only a rename gives a folder this name
        rank-00000.safetensors  what rank 0 owned: `model/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `rng/cpu/0`
        manifest.json           step, data position, each file's size and hash, where each box of each tensor is
      step-00001000.tmp-7/      being written by generation 7, or left by its death: removed by the next start
      step-00000450.damaged/    failed its verification and was set aside
      latest                    the name of the newest complete folder

Files are safetensors and JSON: nothing in a checkpoint can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-.+")


class Damaged(SeatrialError):
    """A checkpoint is not what its manifest says; the message names the file and both hashes or sizes."""


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """Where one box of a tensor is."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


@dataclass
class Entry:
    """One whole tensor: its shape, its type, and the boxes that make it up."""

    shape: tuple[int, ...]
    dtype: str
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """How far the run had come."""

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
    files: list[File]
    tensors: dict[str, Entry]  # "KIND/NAME"

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The inverse of `as_json`. Raises KeyError, TypeError or ValueError on anything else."""
        if value["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {value['schema_version']}, expected {SCHEMA_VERSION}")
        files = [File(**f) for f in value["files"]]
        names = {f.file for f in files}
        for name in names:
            if not name or Path(name).name != name:
                raise ValueError(f"{name!r} is not the name of a file in this folder")
        tensors = {}
        for key, e in value["tensors"].items():
            entry = Entry(tuple(e["shape"]), e["dtype"])
            for p in e["parts"]:
                part = Part(p["file"], tuple(p["offsets"]), tuple(p["sizes"]))
                # Only what is hashed is read, and only where it belongs.
                if part.file not in names:
                    raise ValueError(f"{key} is in {part.file!r}, which is not among the files")
                if part.box.intersect(Box.whole(entry.shape)) != part.box:
                    raise ValueError(f"{key} has a part outside its shape {entry.shape}")
                entry.parts.append(part)
            tensors[key] = entry
        return cls(
            progress=Progress(**value["progress"]),
            time=value["time"],
            seed=value["seed"],
            architecture=value["architecture"],
            layout=value["layout"],
            job_sha256=value["job_sha256"],
            code=value["code"],
            files=files,
            tensors=tensors,
        )


def folder_name(step: int) -> str:
    """The name of a complete checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a complete checkpoint's folder, judged by its name; None for any other name."""
    match = _COMPLETE.fullmatch(folder.name)
    return int(match[1]) if match else None


def named(checkpoints: Path) -> list[Path]:
    """Folders that bear a complete checkpoint's name, newest step first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if step_of(p) is not None]
    return sorted(found, key=lambda p: step_of(p) or 0, reverse=True)


def complete(checkpoints: Path) -> list[Path]:
    """Folders that have a manifest, newest step first. Their content is not verified here."""
    return [p for p in named(checkpoints) if (p / MANIFEST).is_file()]


def leftovers(checkpoints: Path) -> list[Path]:
    """What a save, or a removal, that died has left: never a complete checkpoint."""
    if not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if _TEMPORARY.fullmatch(p.name))


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json; Damaged if it is missing or not a manifest."""
    path = folder / MANIFEST
    try:
        return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Damaged(f"{path} is missing: this checkpoint is not complete") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is not a checkpoint manifest: {error!r}") from None


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Compare files with the manifest: presence, size, hash. Damaged names the first that differs.

    Of several callers each can take its part of the files: a checkpoint of a large model takes minutes to read.
    """
    manifest = read_manifest(folder)
    for file in manifest.files[part::parts]:
        path = folder / file.file
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        size = path.stat().st_size
        if size != file.bytes:
            raise Damaged(f"{path} has {size} bytes, the manifest says {file.bytes}")
        digest = hash_file(path)
        if digest != file.sha256:
            raise Damaged(f"{path} has sha256 {digest}, the manifest says {file.sha256}")
    return manifest
