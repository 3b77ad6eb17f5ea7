"""The source of an upload, and the entries of a listing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Called with (bytes transferred, bytes in total), from the thread that called `upload`.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """An object in a listing."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Readable:
    """The source of an `upload`: `size` bytes of the descriptor `fd`, starting at `offset`.

    A memfd or a regular file; the descriptor's own position is neither used nor moved. The content must not change
    until `upload` has returned.
    """

    fd: int
    size: int
    offset: int = 0
