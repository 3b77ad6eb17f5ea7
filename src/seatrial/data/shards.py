"""Reading a local shard: every chunk is verified before anything in it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import open_file
from seatrial.data.chunks import RESTORE_HINT, ChunkHashes


class VerifiedFile:
    """A local shard: bytes of it, each chunk compared with its hash before anything in it is used.

    Owns a descriptor that is closed with its last reference: another thread may still read a file that was evicted.
    `seen` has a bit for each chunk that was verified; the creator of this object keeps it.
    """

    def __init__(
        self, path: Path, hashes: Callable[[], ChunkHashes] | None, seen: bytearray, chunk_bytes: int
    ) -> None:
        """Without `hashes` nothing is compared. `chunk_bytes` must match theirs."""
        self.path = path
        self._get_hashes = hashes
        self._hashes: ChunkHashes | None = None
        self._seen = seen
        self._chunk_bytes = chunk_bytes
        self._fd = -1
        try:
            self._fd = open_file(path, links=True)
        except OSError as e:
            raise self._lost(e.strerror or str(e)) from e

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` (bytes) from byte `offset` on; InputError if the file is damaged or too short."""
        if self._get_hashes is not None:
            first, last = offset // self._chunk_bytes, (offset + len(view) - 1) // self._chunk_bytes
            for number in range(first, last + 1):
                if not self._seen[number >> 3] >> (number & 7) & 1:
                    self._verify(number)
        self._read(view, offset)

    def _verify(self, number: int) -> None:
        assert self._get_hashes is not None
        if self._hashes is None:
            self._hashes = self._get_hashes()
        begin, size = self._hashes.span(number)
        data = memoryview(bytearray(size))
        self._read(data, begin)
        if (problem := self._hashes.problem(number, data)) is not None:
            raise InputError(Diagnostic(problem, file=str(self.path), hint=RESTORE_HINT))
        # Two threads may each lose the other's bit: then a chunk is verified once more.
        self._seen[number >> 3] |= 1 << (number & 7)

    def _read(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise self._lost(e.strerror or str(e)) from e
            if n == 0:
                raise self._lost(
                    f"it ends before byte {offset + len(view)}; it was longer when the store was opened"
                )
            done += n

    def _lost(self, why: str) -> InputError:
        return InputError(
            Diagnostic(
                f"cannot read tokens: {why}",
                file=str(self.path),
                hint=f"check the store with: seatrial data verify {self.path.parent}",
            )
        )
