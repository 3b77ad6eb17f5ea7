"""Compare two checkpoints tensor by tensor, whatever layouts wrote them. Without torch: this runs next to the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Damaged, Manifest
from seatrial.checkpoint.verified import verify


@dataclass(frozen=True)
class Difference:
    """Difference between checkpoint `ours` and `theirs`; equal if both lists are empty."""

    tensors: int
    differing: list[str] = field(default_factory=list)  # not bit-equal
    missing: list[str] = field(default_factory=list)  # in only one of them, or of different shape or dtype
    # Of |a - b| / |b| in any tensor, with the 2-norm; infinity if it has integers, or is not finite.
    largest: float = 0.0
    where: str = ""

    @property
    def equal(self) -> bool:
        return not self.differing and not self.missing


def compare(ours: Path, theirs: Path) -> Difference:
    """Compare all weights and optimizer states; RNG states too if the layouts are the same.

    Raises Damaged if a checkpoint does not match its manifest.
    """
    a, b = verify(ours), verify(theirs)
    same_layout = a.layout == b.layout
    if same_layout and _content(a) == _content(b):
        return Difference(len(a.tensors))
    keys_a, keys_b = ({k for k in m.tensors if same_layout or not k.startswith("rng/")} for m in (a, b))
    missing = sorted(keys_a ^ keys_b)
    differing: list[str] = []
    largest, where = 0.0, ""
    with _Files(ours, a) as files_a, _Files(theirs, b) as files_b:
        for key in sorted(keys_a & keys_b):
            if a.tensors[key].shape != b.tensors[key].shape or a.tensors[key].dtype != b.tensors[key].dtype:
                missing.append(key)
                continue
            one, other = files_a.whole(key), files_b.whole(key)
            if one.tobytes() == other.tobytes():
                continue
            differing.append(key)
            distance = _distance(one, other)
            if distance > largest:
                largest, where = distance, key
    return Difference(len(keys_a & keys_b), differing, missing, largest, where)


def _content(manifest: Manifest) -> list[tuple[str, list[str]]]:
    return sorted((file.file, file.hashes) for file in manifest.files)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.dtype.kind in "iub":  # counters, states of random generators
        return math.inf
    x, y = one.astype(np.float64), other.astype(np.float64)
    size = float(np.linalg.norm(y))
    apart = float(np.linalg.norm(x - y))
    distance = apart / size if size else apart
    return distance if math.isfinite(distance) else math.inf


class _Files:
    """The files of one checkpoint, open until the block ends."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def whole(self, key: str) -> np.ndarray:
        """A whole tensor, assembled from its parts."""
        entry = self.manifest.tensors[key]
        out: np.ndarray | None = None
        for part in entry.parts:
            values = self._file(part.file).get_tensor(key)
            if values.shape == entry.shape:
                return np.asarray(values)
            if out is None:
                out = np.empty(entry.shape, dtype=values.dtype)
            out[Box(part.offsets, part.sizes).slices()] = values
        if out is None:
            raise Damaged(f"{self.folder}: {key} has no part")
        return out

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safetensors.safe_open(self.folder / name, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise Damaged(f"{self.folder / name} cannot be read: {error}") from None
        return self._open[name]
