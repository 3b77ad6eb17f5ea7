"""What goes into a store, and what a listing of one shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Called with (bytes that arrived, bytes in all), from the thread that called `upload`.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """An object as a listing shows it."""

    name: str
    bytes: int
    mtime: float  # seconds since 1970, by the clock of the service or of the file server


@dataclass(frozen=True)
class Readable:
    """What `upload` sends: `size` bytes of the descriptor `fd` from `offset` on.

    A memfd or a regular file; the descriptor's own position is neither used nor moved. The content must not change
    until `upload` has returned.
    """

    fd: int
    size: int
    offset: int = 0
