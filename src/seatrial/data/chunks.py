"""Hashes of a shard's chunks: they let a few tokens be verified without reading the whole shard.

The hash is XXH3-128, which detects damage at memory speed. It does not protect against deliberate collisions; for that
`seatrial data verify` compares the SHA-256 of whole files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import NotAFile, open_file, read_bytes
from seatrial.data.manifest import ChunkFile, ShardFile
from seatrial.storage.local import LocalStore

# Large enough that hashes are a small part of the data (16 bytes of 262,144) and that a request to an object store is
# worth its latency; small enough that a sample of some kilobytes does not cost megabytes.
CHUNK_BYTES = 1 << 18
DIGEST_BYTES = 16
_BLOCK = 1 << 22


class ChunkHasher:
    """Hashes consecutive chunks of the data passed to `update`, in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._state = xxhash.xxh3_128()
        self._filled = 0  # bytes in the incomplete chunk
        self._digests = bytearray()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            n = min(len(view) - done, self._chunk_bytes - self._filled)
            self._state.update(view[done : done + n])
            done += n
            self._filled += n
            if self._filled == self._chunk_bytes:
                self._close()

    def _close(self) -> None:
        self._digests += self._state.digest()
        self._state.reset()
        self._filled = 0

    def finish(self) -> bytes:
        """16 bytes per chunk; the last chunk may be shorter than the others."""
        if self._filled:
            self._close()
        return bytes(self._digests)


@dataclass(frozen=True)
class ChunkHashes:
    """The hashes of one shard's chunks."""

    chunk_bytes: int
    shard_bytes: int
    digests: bytes

    def span(self, number: int) -> tuple[int, int]:
        """(first byte, size in bytes) of chunk `number`."""
        begin = number * self.chunk_bytes
        return begin, min(self.chunk_bytes, self.shard_bytes - begin)

    def problem(self, number: int, data: bytes | memoryview) -> str | None:
        """The problem of `data` as the content of chunk `number`; None if it is intact."""
        begin, size = self.span(number)
        if len(data) != size:
            return f"truncated: {len(data)} of {size} bytes from byte {begin} on"
        expected = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        found = xxhash.xxh3_128_digest(data)
        if found == expected:
            return None
        return (
            f"damaged: bytes {begin} to {begin + size - 1} have the XXH3-128 {found.hex()}, "
            f"expected {expected.hex()}"
        )


def parse(stored: ChunkFile, shard_bytes: int, data: bytes, place: str) -> ChunkHashes:
    """The hashes in `data`, the content of the file `stored`; InputError if it does not match the manifest."""
    found = xxhash.xxh3_128_hexdigest(data)
    if found != stored.xxh3_128:
        raise InputError(
            Diagnostic(
                f"damaged: XXH3-128 {found}, the manifest has {stored.xxh3_128}",
                file=place,
                hint=RESTORE_HINT,
            )
        )
    return ChunkHashes(stored.chunk_bytes, shard_bytes, data)


RESTORE_HINT = (
    "restore the file from a copy, or prepare the data again; `seatrial data verify` checks all of it"
)


class MadeHashes:
    """Chunk hashes of shards that were written without any, computed at each shard's first use and kept in `folder`.

    This reads the whole shard, and compares its SHA-256 with the manifest's on the way. They are stored under
    that SHA-256, so they never apply to other content. Of several processes one computes them, the others wait.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, shard: ShardFile, path: Path) -> ChunkHashes:
        """The chunk hashes; InputError if the shard is damaged, StorageError if the folder cannot be written to."""
        kept = self._folder / f"{shard.sha256}.xxh3"
        digests = self._kept(kept, shard)
        if digests is None:
            with self._locked(kept):
                digests = self._kept(kept, shard)
                if digests is None:
                    digests = _hash_shard(shard, path)
                    # With its own hash, because this file is trusted like a manifest.
                    LocalStore(self._folder).write(kept.name, xxhash.xxh3_128_digest(digests) + digests)
        return ChunkHashes(CHUNK_BYTES, shard.bytes, digests)

    def _kept(self, path: Path, shard: ShardFile) -> bytes | None:
        try:
            data = read_bytes(path)
        except (FileNotFoundError, NotAFile):
            return None
        own, digests = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        whole = len(digests) == DIGEST_BYTES * -(-shard.bytes // CHUNK_BYTES)
        return digests if whole and own == xxhash.xxh3_128_digest(digests) else None

    @contextlib.contextmanager
    def _locked(self, kept: Path) -> Iterator[None]:
        LocalStore(self._folder, create=True)
        try:
            fd = open_file(self._folder / f".{kept.stem}.lock", os.O_RDWR | os.O_CREAT)
        except OSError as e:
            raise InputError(
                f"cannot keep hashes of the data in {self._folder}: {e.strerror}",
                hint="prepare the data again with this version, which stores them next to it",
            ) from e
        with open(fd, "rb+"):
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield


def _hash_shard(shard: ShardFile, path: Path) -> bytes:
    """The chunk hashes of the file at `path`; InputError if it is not the shard."""
    whole, chunks = hashlib.sha256(), ChunkHasher()
    try:
        with open(open_file(path, links=True), "rb", buffering=0) as f:
            while block := f.read(_BLOCK):
                whole.update(block)
                chunks.update(block)
    except OSError as e:
        raise InputError(Diagnostic(f"cannot be read: {e.strerror}", file=str(path))) from e
    if whole.hexdigest() != shard.sha256:
        raise InputError(
            Diagnostic(
                f"damaged: SHA-256 {whole.hexdigest()}, the manifest has {shard.sha256}",
                file=str(path),
                hint=RESTORE_HINT,
            )
        )
    return chunks.finish()
