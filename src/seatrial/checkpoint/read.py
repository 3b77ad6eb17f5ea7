"""Reading a checkpoint: any box of any tensor, whatever layout wrote it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from seatrial.base import atomic
from seatrial.base.box import Box
from seatrial.checkpoint.commit import part_name
from seatrial.checkpoint.manifest import LATEST, Damaged, Manifest, complete, read_manifest
from seatrial.checkpoint.stream import NAMES
from seatrial.job.architecture import Architecture


class CheckpointWeights:
    """One complete checkpoint as a weight source. Files stay mapped until `close`."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        """`manifest`: what `verify` returned, to spare reading it again."""
        self.folder = folder
        self.manifest = manifest or read_manifest(folder)
        self._files: dict[str, Any] = {}

    def close(self) -> None:
        """Let go of the files: as long as they are mapped, a deleted checkpoint keeps its place on the disk."""
        self._files.clear()

    @property
    def arch(self) -> Architecture:
        return Architecture.from_dict(self.manifest.architecture)

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    def dtype(self, name: str) -> torch.dtype:
        """The type that model parameter `name` is stored in."""
        entry = self.manifest.tensors.get(f"model/{name}")
        if entry is None:
            raise Damaged(f"{self.folder} has no tensor model/{name}")
        if entry.dtype not in NAMES:
            raise Damaged(f"{self.folder}: model/{name} has the unknown type {entry.dtype!r}")
        return NAMES[entry.dtype]

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of model parameter `name`."""
        return self.read_kind("model", name, box, dtype)

    def read_kind(self, kind: str, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of `KIND/NAME` (kind: model, exp_avg, exp_avg_sq)."""
        key = f"{kind}/{name}"
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise Damaged(f"{self.folder} has no tensor {key}")
        out = torch.empty(box.sizes, dtype=dtype)
        filled = 0
        for part in entry.parts:
            common = part.box.intersect(box)
            if common is None:
                continue
            values = self._open(part.file).get_slice(key)[common.relative_to(part.box).slices()]
            out[common.relative_to(box).slices()] = values.to(dtype)
            filled += common.numel
        if filled != box.numel:
            raise Damaged(f"{self.folder}: {key} has {filled} of {box.numel} values in {box}")
        return out

    def tensor(self, file_rank: int, key: str) -> Tensor | None:
        """A tensor that belongs to one rank (its random state), or None where that rank saved none."""
        name = part_name(file_rank)
        if not (self.folder / name).is_file():
            return None
        opened = self._open(name)
        return opened.get_tensor(key) if key in opened.keys() else None  # noqa: SIM118 (not a dict)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safetensors.safe_open(self.folder / file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise Damaged(f"{self.folder / file} cannot be read: {error}") from None
        return self._files[file]


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, not verified; None if there is none."""
    found = complete(checkpoints)
    return found[0] if found else None


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to `NAME.damaged`, so that it is kept but never chosen; its new path."""
    aside = folder.with_name(f"{folder.name}.damaged")
    n = 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.damaged-{n}")
    os.rename(folder, aside)
    latest = folder.parent / LATEST
    left = newest(folder.parent)
    if left is not None:
        atomic.write_text(latest, left.name + "\n")
    else:
        latest.unlink(missing_ok=True)
    return aside
