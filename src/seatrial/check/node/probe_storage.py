"""Measure storage speed with one file: `python -m seatrial.check.node.probe_storage FOLDER MIB SECONDS NAME`.

A separate process, because a hanging file system hangs its caller. One JSON line on stdout. The file has no name
(O_TMPFILE), or is unlinked at once if the file system does not support that: the kernel frees it with this process.
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
    """Write up to `size` bytes and read them back, `seconds` at most each way. Rates in decimal GB/s, None if unknown.

    `direct`: the page cache was bypassed (O_DIRECT). If it cannot be, written data counts once it is synced, and the
    kernel is asked to drop it from the cache before reading.
    """
    fd, direct, unnamed = _open(folder, name)
    try:
        # Incompressible: a file system that compresses would look faster than it is.
        block = mmap.mmap(-1, _BLOCK)
        block.write(os.urandom(_BLOCK))
        started_at = time.perf_counter()
        written = 0
        while written < size and time.perf_counter() - started_at < seconds:
            # No two blocks alike, because of file systems that deduplicate.
            block[:8] = written.to_bytes(8, "little")
            done = os.write(fd, block)
            if done != _BLOCK:
                raise OSError(errno.ENOSPC, "short write")
            written += done
            if not direct and written % _SYNC_BYTES == 0:
                os.fdatasync(fd)  # else the time would only be up when all of it is in the cache
        os.fsync(fd)
        write_s = time.perf_counter() - started_at
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        started_at = time.perf_counter()
        got = wrong = 0
        into = mmap.mmap(-1, _BLOCK)
        while got < written and time.perf_counter() - started_at < seconds:
            done = os.readv(fd, [into])
            if done <= 0:
                break
            wrong += done != _BLOCK or into[:8] != got.to_bytes(8, "little") or into[-64:] != block[-64:]
            got += done
        read_s = time.perf_counter() - started_at
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
    """Open a file without a name: its descriptor, whether it bypasses the cache, and whether it never had a name."""
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
            # The file may exist although it could not be opened with O_DIRECT.
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
        values: dict[str, Any] = measure(folder, int(mib) * _MIB, float(seconds), name)
    except OSError as error:
        values = {"problem": error.strerror or str(error), "errno": errno.errorcode.get(error.errno or 0, "")}
    print(json.dumps(values), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
