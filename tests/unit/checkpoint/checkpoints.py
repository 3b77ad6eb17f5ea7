"""Checkpoints of a small state, written as ranks write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saving import new_manifest, unfenced
from seatrial.base.box import Box, chunk
from seatrial.checkpoint import hashing, memory, part
from seatrial.checkpoint.commit import Fence
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.checkpoint.memory import Filling
from seatrial.checkpoint.place import Place
from seatrial.checkpoint.stream import FilePlan, raw_bytes
from seatrial.checkpoint.write import Piece, boxes_of

__all__ = ["add", "make_manifest", "memory", "rows", "small_chunks", "state"]


def small_chunks(monkeypatch: object, size: int = 256) -> None:
    """Write files in chunks of `size` bytes: many chunks of a small state."""
    for module in (hashing, part):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)  # type: ignore[attr-defined]
    # Taken at the definition.
    monkeypatch.setattr(hashing.spans, "__defaults__", (size,))  # type: ignore[attr-defined]


def state(seed: int = 0) -> dict[str, Tensor]:
    """Whole tensors by key: several types and dimensions, one a scalar."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/w": torch.randn(10, 7, generator=generator),
        "model/deep": torch.randn(6, 3, 5, generator=generator),
        "model/half": torch.randn(33, generator=generator).bfloat16(),
        "exp_avg/w": torch.randn(10, 7, generator=generator),
        "optimizer/updates": torch.tensor(7.0),
    }


def rows(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """What `rank` owns: its rows of each tensor; scalars are rank 0's. And its random state."""
    pieces = []
    for key, whole in tensors.items():
        box = Box.whole(whole.shape)
        if whole.dim():
            box = box.narrow(0, *chunk(whole.shape[0], ranks, rank))
            if not box.sizes[0]:
                continue
        elif rank:
            continue
        pieces.append(Piece(key, whole[box.slices()].contiguous(), box, tuple(whole.shape)))
    noise = torch.arange(100, dtype=torch.uint8) + rank
    pieces.append(Piece(f"rng/cpu/{rank}", noise, Box.whole((100,)), (100,)))
    return pieces


def make_manifest(step: int, generation: int = 3) -> Manifest:
    return new_manifest(Progress(step, step * 10, step, generation))


def add(
    place: Place,
    step: int,
    parts: Sequence[Sequence[Piece]],
    *,
    generation: int = 3,
    read_back: bool = True,
    fence: Fence = unfenced,
    commit: bool = True,
) -> None:
    """A checkpoint of `step` with one part for each rank; without `commit` only the parts."""
    for rank, pieces in enumerate(parts):
        plan = FilePlan([(p.key, p.tensor) for p in pieces])
        head = plan.head(boxes_of(pieces))
        fd = os.memfd_create("part")
        try:
            size = len(head) + plan.data_bytes
            filling = Filling(fd, size)
            filling.add(head)
            for piece in pieces:
                if piece.tensor.numel():
                    filling.add(raw_bytes(piece.tensor.contiguous()))
            filling.finish()
            index = json.loads(json.dumps({"pieces": [piece.to_index() for piece in pieces]}))
            place.put_part(step, generation, rank, fd, size, index, read_back)
        finally:
            os.close(fd)
    if commit:
        place.commit(step, generation, make_manifest(step, generation), len(parts), fence)


def names(folder: Path) -> list[str]:
    """Everything below `folder`, as relative paths."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
