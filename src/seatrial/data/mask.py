"""The loss mask of a shard: one bit per token, least significant first, 1 where it counts in the loss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]


class MaskPacker:
    """Packs the mask of a shard, given in pieces of any size."""

    def __init__(self, n_before: int) -> None:
        """`n_before` tokens come before, which all count."""
        self.n_counted = n_before
        self._packed = bytearray(b"\xff" * (n_before // 8))
        self._rest: Bits = np.ones(n_before % 8, dtype=np.bool_)

    def append(self, counted: Bits) -> None:
        self.n_counted += int(np.count_nonzero(counted))
        bits = np.concatenate([self._rest, counted])
        whole = len(bits) // 8 * 8
        self._packed += np.packbits(bits[:whole], bitorder="little").tobytes()
        self._rest = bits[whole:]

    def finish(self) -> bytes:
        """All bits; unused ones of the last byte are 0."""
        return bytes(self._packed) + np.packbits(self._rest, bitorder="little").tobytes()


def mask_bytes(first: int, count: int) -> tuple[int, int]:
    """(first byte, number of bytes) in which the bits of tokens [first, first + count) are."""
    return first // 8, -(-(first + count) // 8) - first // 8


def unpack_mask(data: npt.NDArray[np.uint8], first: int, count: int) -> Bits:
    """The mask of tokens [first, first + count), from the bytes that `mask_bytes` names."""
    return np.unpackbits(data, bitorder="little")[first % 8 :][:count].view(np.bool_)
