"""The hash of a checkpoint's data: XXH3-128, one per chunk of a file.

It runs at memory speed, so that every byte can be checked whenever it is read, and detects any accidental corruption.
It is not cryptographic: it does not protect against forging both data and hash. One per chunk, so that a part of
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
# Small enough that a box that is scattered over many files can be read without much excess; large enough that
# the hashes of a terabyte take 9 MB.
CHUNK_BYTES = 1 << 22


def new_hash() -> xxhash.xxh3_128:
    """An empty hash, to be fed by `update`."""
    return xxhash.xxh3_128()


def hash_of(data: Buffer) -> str:
    """The hash of `data`, hexadecimal. Releases the GIL."""
    return str(xxhash.xxh3_128_hexdigest(data))


def spans(size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """(begin, end) of each chunk of a file of `size` bytes."""
    for begin in range(0, size, chunk_bytes):
        yield begin, min(begin + chunk_bytes, size)
