"""How fast a folder's storage takes and gives back a file: `python -m seatrial.check.node.probe_storage FOLDER MIB SECONDS NAME`.

A process of its own, because a file system that hangs hangs its caller. One JSON line on stdout. The file has no name
(O_TMPFILE), or loses it at once where the file system knows no such files: the kernel frees it with this process.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

_BLOCK = 4 << 20
_MIB = 1 << 20
_SYNC_BYTES = 8 * _BLOCK


def measure(folder: str, size: int, seconds: float, name: str) -> dict[str, Any]:
    """Write up to `size` bytes and read them back, `seconds` at most each way. Rates in GB/s (decimal), None if not known.

    `direct` says whether the page cache was left out (O_DIRECT). Where it cannot be, what was written counts when it is
    synced, and the cache is told to forget it before it is read; `cached` says that it was not forgotten (tmpfs).
    """
    fd, direct, unnamed = _open(folder, name)
    try:
        # What cannot be compressed: a file system that compresses would look faster than it is.
        block = mmap.mmap(-1, _BLOCK)
        block.write(os.urandom(_BLOCK))
        begun = time.perf_counter()
        written = 0
        while written < size and time.perf_counter() - begun < seconds:
            block[:8] = written.to_bytes(
                8, "little"
            )  # no two blocks alike, for those that store equal ones once
            done = os.write(fd, block)
            if done != _BLOCK:
                raise OSError(errno.ENOSPC, "less was written than asked for")
            written += done
            if not direct and written % _SYNC_BYTES == 0:
                os.fdatasync(fd)  # else the time would only be over when all of it is in the cache
        os.fsync(fd)
        write_s = time.perf_counter() - begun
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        begun = time.perf_counter()
        got = wrong = 0
        into = mmap.mmap(-1, _BLOCK)
        while got < written and time.perf_counter() - begun < seconds:
            done = os.readv(fd, [into])
            if done <= 0:
                break
            wrong += done != _BLOCK or into[:8] != got.to_bytes(8, "little") or into[-64:] != block[-64:]
            got += done
        read_s = time.perf_counter() - begun
    finally:
        os.close(fd)
    return {
        "write_gb_s": written / write_s / 1e9,
        "read_gb_s": got / read_s / 1e9 if got else None,
        "written_bytes": written,
        "read_bytes": got,
        "direct": direct,
        "unnamed": unnamed,
        "wrong_blocks": wrong + (got == 0),
    }


def _open(folder: str, name: str) -> tuple[int, bool, bool]:
    """A file without a name: its descriptor, whether it goes past the cache, and whether it never had a name."""
    for direct in (os.O_DIRECT, 0):
        try:
            return (
                os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | direct, 0o600),
                bool(direct),
                True,
            )
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS):
                raise
    path = os.path.join(folder, name)
    for direct in (os.O_DIRECT, 0):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
        except OSError as error:
            # The file may be there although it could not be opened past the cache.
            if error.errno == errno.EINVAL and direct:
                _forget(path)
                continue
            raise
        os.unlink(path)
        return fd, bool(direct), False
    raise AssertionError("opening without O_DIRECT returns or raises")


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def main(argv: Sequence[str]) -> int:
    """Entry; the exit code."""
    folder, mib, seconds, name = argv
    try:
        told: dict[str, Any] = measure(folder, int(mib) * _MIB, float(seconds), name)
    except OSError as error:
        told = {"problem": error.strerror or str(error), "errno": errno.errorcode.get(error.errno or 0, "")}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
