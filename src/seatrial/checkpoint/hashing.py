"""The hash of a checkpoint's data: XXH3-128, one for each chunk of a file.

It runs at memory speed, so that every byte can be checked whenever it is read, and changes with any accident that can
happen to data. It proves nothing against somebody who forges both data and hash. One for each chunk, so that a part of
a file can be read and checked without the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

NAME = "XXH3-128"
HEX_DIGITS = 32
# Small enough that a box which lies scattered over many files can be read without reading much more than it; large
# enough that the hashes of a terabyte take 9 MB.
CHUNK_BYTES = 1 << 22


def new_hash() -> xxhash.xxh3_128:
    """A hash to be fed by `update`."""
    return xxhash.xxh3_128()


def hash_of(data: Buffer) -> str:
    """The hash of `data`, hexadecimal. Other threads run meanwhile."""
    return str(xxhash.xxh3_128_hexdigest(data))


class ChunkHasher:
    """Hashes of the chunks of what is given piece by piece."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.bytes = 0
        self._hashes: list[str] = []
        self._hash = new_hash()

    def add(self, data: Buffer) -> None:
        """The next bytes."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: self.chunk_bytes - self.bytes % self.chunk_bytes]
            self._hash.update(part)
            self.bytes += len(part)
            view = view[len(part) :]
            if self.bytes % self.chunk_bytes == 0:
                self._hashes.append(self._hash.hexdigest())
                self._hash = new_hash()

    def hashes(self) -> list[str]:
        """One for each chunk of what was added; the last may be of a shorter one."""
        return self._hashes + ([self._hash.hexdigest()] if self.bytes % self.chunk_bytes else [])


def spans(size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """(begin, end) of each chunk of a file of `size` bytes."""
    for begin in range(0, size, chunk_bytes):
        yield begin, min(begin + chunk_bytes, size)
