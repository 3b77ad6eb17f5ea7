"""Document boundaries: the index of a shard, searched on disk, and document numbers within samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import open_file
from seatrial.data.chunks import RESTORE_HINT

_ENTRY = np.dtype("<u8")
_AT_ONCE = 512  # entries: size of the last search interval, and of one read

Positions = npt.NDArray[np.int64]


class DocumentIndex:
    """Ascending uint64 starts of documents, in tokens from their shard's start; searched without loading all."""

    def __init__(self, read: Callable[[int, int], bytes], n_documents: int, place: str) -> None:
        """`read` returns (offset, size) bytes of the index, or fewer at its end; `place` is its path or address."""
        self._pread = read
        self._n = n_documents
        self._place = place

    @classmethod
    def open(cls, path: Path, n_documents: int) -> DocumentIndex:
        """The index in the file at `path`; nothing of it is kept in memory."""
        try:
            file = _File(path)
        except OSError as e:
            raise _lost(str(path), e.strerror or str(e)) from e
        return cls(file.read, n_documents, str(path))

    @classmethod
    def of(cls, data: bytes, n_documents: int, place: str) -> DocumentIndex:
        """The index in `data`, which was read from `place`."""
        return cls(lambda offset, size: data[offset : offset + size], n_documents, place)

    def between(self, begin: int, end: int) -> Positions:
        """The starts in [begin, end), ascending, int64."""
        found = []
        at = self._first_at_least(begin)
        while at < self._n:
            part = self._read(at, min(_AT_ONCE, self._n - at))
            inside = int(np.searchsorted(part, end))
            found.append(part[:inside])
            if inside < len(part):
                break
            at += len(part)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _first_at_least(self, position: int) -> int:
        low, high = 0, self._n
        while high - low > _AT_ONCE:
            middle = (low + high) // 2
            if int(self._read(middle, 1)[0]) < position:
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self._read(low, high - low), position))

    def _read(self, first: int, count: int) -> Positions:
        size = count * _ENTRY.itemsize
        try:
            data = self._pread(first * _ENTRY.itemsize, size)
        except OSError as e:
            raise _lost(self._place, e.strerror or str(e)) from e
        if len(data) != size:
            raise _lost(self._place, f"it ends before document {first + count} of {self._n}")
        return np.frombuffer(data, dtype=_ENTRY).astype(np.int64)


class _File:
    """A descriptor that is closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = open_file(path, links=True)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)


def _lost(place: str, why: str) -> InputError:
    return InputError(Diagnostic(f"cannot read the document index: {why}", file=place, hint=RESTORE_HINT))


def numbered(starts_of_rows: list[Positions], length: int) -> npt.NDArray[np.int32]:
    """int32 [row, token]: the number, from 0, of the document within its row that each token belongs to.

    `starts_of_rows` contains for each row the positions, after the first token, where another document begins.
    """
    begins = np.zeros((len(starts_of_rows), length), dtype=np.int32)
    for row, starts in zip(begins, starts_of_rows, strict=True):
        row[starts] = 1
    return begins.cumsum(axis=1, dtype=np.int32)
