"""A box: the part of a whole tensor that one shard holds.

Every layout (tensor, pipeline, sharded data parallel) is described to the readers and writers of
weights as boxes in the whole tensor, so that a checkpoint, a Hugging Face folder and a random
initialisation share one interface: return the values of this box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """`sizes[d]` rows starting at `offsets[d]`, in each dimension d of a whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box needs as many offsets as sizes: {self.offsets}, {self.sizes}")
        if any(o < 0 for o in self.offsets) or any(s < 0 for s in self.sizes):
            raise ValueError(f"a box has no negative offset or size: {self.offsets}, {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        n = 1
        for s in self.sizes:
            n *= s
        return n

    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The intersection of two boxes of one tensor, or None if they are disjoint."""
        offsets, sizes = [], []
        for o1, s1, o2, s2 in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            lo, hi = max(o1, o2), min(o1 + s1, o2 + s2)
            if hi <= lo:
                return None
            offsets.append(lo)
            sizes.append(hi - lo)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: Box) -> Box:
        """This box in coordinates that start at `origin` (which contains it)."""
        return Box(tuple(o - b for o, b in zip(self.offsets, origin.offsets, strict=True)), self.sizes)

    def narrow(self, dim: int, offset: int, size: int) -> Box:
        """The part of this box that covers `size` rows starting at its own row `offset`, in `dim`."""
        if offset < 0 or size < 0 or offset + size > self.sizes[dim]:
            raise ValueError(f"rows {offset}..{offset + size} of dimension {dim} are outside {self.sizes}")
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += offset
        sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of part `index` when `length` rows are split as `torch.chunk` splits them.

    Every part has ceil(length / parts) rows until the rows run out; late parts may be empty. FSDP2
    and DTensor split this way, so their shards are these boxes.
    """
    step = -(-length // parts)
    offset = min(index * step, length)
    return offset, min(step, length - offset)
