"""A rank's part on its way from memory to a file: hashed in memory, written, and read back."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from seatrial.checkpoint.hashing import CHUNK_BYTES, NAME, hash_of, new_hash, spans
from seatrial.checkpoint.manifest import Damaged, File
from seatrial.checkpoint.source import Source
from seatrial.checkpoint.verified import VerifiedFiles

# Written between two waits for the disk: shows progress, and limits dirty pages in the cache.
_SYNC_BYTES = 1 << 28

# Called with the bytes hashed, written or read back since the last call: the caller may monitor progress.
Beat = Callable[[int], None]


def no_beat(_done: int) -> None:
    """For callers that do not monitor progress."""


@contextlib.contextmanager
def mapped(fd: int, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a memory file. Damaged if it is shorter."""
    if os.fstat(fd).st_size < size:
        raise Damaged(f"the memory file has {os.fstat(fd).st_size} bytes, not {size}")
    if size == 0:
        yield memoryview(b"")
        return
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        yield view


def describe(name: str, data: memoryview) -> File:
    """The description of `data` as the file `name`: its size, and the hash of each chunk."""
    hashes = [hash_of(data[begin:end]) for begin, end in spans(len(data))]
    return File(name, len(data), CHUNK_BYTES, hashes)


def check_whole(data: memoryview, expected: str, what: str) -> None:
    """Damaged unless all of `data` has the hash `expected`."""
    digest = new_hash()
    for begin, end in spans(len(data)):
        digest.update(data[begin:end])
    if digest.hexdigest() != expected:
        raise Damaged(f"{what} has {NAME} {digest.hexdigest()}, not {expected}")


def write_file(path: Path, data: memoryview, beat: Beat = no_beat) -> None:
    """Write `data` to a new file at `path`, durably, and drop it from the page cache.

    Raises OSError, and then no file is left. An existing file is unlinked, not overwritten: others may have it open.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            synced = 0
            for begin, end in spans(len(data)):
                done = begin
                while done < end:
                    done += os.write(fd, data[done:end])
                beat(end - begin)
                if end - synced >= _SYNC_BYTES:
                    os.fdatasync(fd)
                    synced = end
                    beat(0)
            os.fsync(fd)
            # So that the read-back comes from the disk, and training's files stay in the cache.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)  # NFS may report a full disk here
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()  # a partial file is of no use, and its space may be needed
        raise


def read_again(source: Source, file: File, beat: Beat = no_beat) -> None:
    """Read a file back from the storage and compare it with what was written. Damaged if it differs."""
    files = VerifiedFiles(source, [file])
    try:
        files.verify(count=beat)
    except Damaged as error:
        raise Damaged(f"the file read back differs from what was written: {error.message}") from None
    finally:
        files.close()
