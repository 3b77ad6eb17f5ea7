"""Read a checkpoint: any box of any tensor, whatever layout wrote it; every byte is verified before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Damaged, Entry, Manifest, Part, read_manifest
from seatrial.checkpoint.source import FolderSource, Source
from seatrial.checkpoint.stream import DTYPES, NAMES, raw_bytes
from seatrial.checkpoint.verified import VerifiedFiles
from seatrial.job.architecture import Architecture

_BLOCK_BYTES = 1 << 25  # read at once of what cannot be read directly into its target
_FORMAT_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class CheckpointWeights:
    """One complete checkpoint as a weight source. No prior verification is needed: reading verifies.

    Every read raises Damaged if what it needs does not match the manifest, and StorageError if the storage does not
    answer. Its memory is bounded by a cache (`CACHE_BYTES` of verified.py) and a block, whatever the checkpoint's size. Not thread-safe.
    """

    def __init__(self, source: Path | Source, manifest: Manifest | None = None) -> None:
        """`source`: a checkpoint's folder, or the source of a `Place`; `manifest` avoids reading it again."""
        if isinstance(source, Path):
            manifest = manifest or read_manifest(source)
            source = FolderSource(source)
        assert manifest is not None, "a source other than a folder needs `manifest`"
        self.manifest = manifest
        self.where = source.where  # path or address
        self._files = VerifiedFiles(source, manifest.files)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Release files and memory: as long as a file is open, a deleted checkpoint keeps occupying disk space."""
        self._files.close()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def arch(self) -> Architecture:
        return Architecture.from_dict(self.manifest.architecture)

    @property
    def step(self) -> int:
        return self.manifest.progress.step

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that model parameter `name` is stored in."""
        return self._dtype(f"model/{name}", self._entry(f"model/{name}"))

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of model parameter `name`."""
        return self.read_kind("model", name, box, dtype)

    def read_kind(self, kind: str, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of `KIND/NAME` (kind: model, exp_avg, exp_avg_sq)."""
        out = torch.empty(box.sizes, dtype=dtype)
        self.read_into(f"{kind}/{name}", box, out)
        return out

    @torch.no_grad()
    def read_into(self, key: str, box: Box, out: Tensor) -> None:
        """Fill `out`, on the CPU, of `box.sizes` and any dtype, with the values of `box` of the tensor `key`.

        After an error part of it may have been written.
        """
        assert out.shape == box.sizes
        assert out.device.type == "cpu"
        entry = self._entry(key)
        dtype = self._dtype(key, entry)
        filled = 0
        for part in entry.parts:
            common = part.box.intersect(box)
            if common is None:
                continue
            self._read_part(key, part, dtype, common, out[common.relative_to(box).slices()])
            filled += common.numel
        if filled != box.numel:
            raise Damaged(f"{self.where}: {key} has {filled} of {box.numel} values in {box}")

    def tensor(self, file_rank: int, key: str) -> Tensor | None:
        """A tensor that belongs to one rank (its random state), or None if that rank saved none."""
        file = self._files.file_of(file_rank)
        if file is None:
            return None
        found = self._files.header(file)[0].get(key)
        if found is None:
            return None
        dtype = _FORMAT_DTYPES.get(found.get("dtype"))
        if dtype is None:
            raise Damaged(f"{self.where}/{file}: {key} has the unknown type {found.get('dtype')!r}")
        out = torch.empty(found["shape"], dtype=dtype)
        self._fill(file, self._place(file, key, tuple(out.shape), dtype), out)
        return out

    # -- how

    def _entry(self, key: str) -> Entry:
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise Damaged(f"{self.where} has no tensor {key}")
        return entry

    def _dtype(self, key: str, entry: Entry) -> torch.dtype:
        if entry.dtype not in NAMES:
            raise Damaged(f"{self.where}: {key} has the unknown type {entry.dtype!r}")
        return NAMES[entry.dtype]

    def _place(self, file: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        size = Box.whole(shape).numel * dtype.itemsize
        return self._files.find(file, key, dtype=DTYPES[dtype], shape=shape, size=size)

    def _read_part(self, key: str, part: Part, dtype: torch.dtype, common: Box, target: Tensor) -> None:
        """Fill `target` with `common`, which lies in `part`."""
        wanted = common.relative_to(part.box)
        begin = self._place(part.file, key, part.sizes, dtype)
        self._files.check_box(part.file, key, part.offsets, self._entry(key).shape)
        # If the box spans whole rows, it is one contiguous range of the file.
        if wanted.sizes[1:] == part.sizes[1:] and target.is_contiguous() and target.dtype == dtype:
            row = Box.whole(part.sizes[1:]).numel * dtype.itemsize
            self._fill(part.file, begin + (wanted.offsets[0] * row if wanted.offsets else 0), target)
            return
        for offset, rows, block in _blocks(wanted, part.sizes, dtype.itemsize):
            if self._scratch.numel() < block.numel * dtype.itemsize:
                self._scratch = torch.empty(block.numel * dtype.itemsize, dtype=torch.uint8)
            values = self._scratch[: block.numel * dtype.itemsize].view(dtype).view(block.sizes)
            self._fill(part.file, begin + offset * dtype.itemsize, values)
            across = (slice(None), *wanted.slices()[1:]) if wanted.sizes else ()
            (target[rows] if wanted.sizes else target).copy_(values[across] if wanted.sizes else values)

    def _fill(self, file: str, begin: int, target: Tensor) -> None:
        if target.numel():
            self._files.read_into(file, raw_bytes(target), begin)


def _blocks(wanted: Box, sizes: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, slice, Box]]:
    """Whole rows, in blocks, of a part with `sizes` that cover the box `wanted` of it.

    For each: the number of values before it in the part, the rows of the target that it fills, and its shape.
    """
    if not sizes:
        yield 0, slice(0, 0), Box.whole(())
        return
    row = Box.whole(sizes[1:]).numel
    at_once = max(1, _BLOCK_BYTES // max(1, row * itemsize))
    for first in range(0, wanted.sizes[0], at_once):
        n = min(at_once, wanted.sizes[0] - first)
        yield (wanted.offsets[0] + first) * row, slice(first, first + n), Box.whole((n, *sizes[1:]))
