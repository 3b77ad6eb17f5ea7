"""Mutual exclusion of processes that run a run: an flock, which the kernel releases however its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from seatrial.base.files import open_file, read_text

# Readers briefly take the lock in shared mode to see whether it is free; a start waits longer than that.
_PATIENCE_S = 0.2
_LONGEST = 32  # bytes of a pid and its newline


class LockHeld(Exception):
    """Another process holds the lock; `pid` is the content of the file, None if it cannot be read."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"held by process {pid}")
        self.pid = pid


def acquire(path: Path) -> int:
    """Lock `path` (created if missing), write our pid into it, return the descriptor that holds the lock.

    Raises LockHeld, or OSError if the file system has no locks, or the file is not a lock. A child that is forked
    without exec shares the lock.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            _check_ours(path, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
            # The folder was renamed between open and lock: this is the lock of the old one. Retry.
            os.close(fd)
            continue
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        if time.monotonic() >= deadline:
            raise LockHeld(_pid_in(path))
        time.sleep(0.01)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock now; False if the file was never created."""
    try:
        fd = open_file(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: a start there fails too
        return False
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> int | None:
    """The pid of the process that holds the lock; None if it is free or the pid cannot be read."""
    return _pid_in(path) if is_held(path) else None


def _pid_in(path: Path) -> int | None:
    try:
        return int(read_text(path, most=_LONGEST))
    except (OSError, ValueError):
        return None


def _check_ours(path: Path, fd: int) -> None:
    # It may be a hard link to another file, which would be overwritten.
    content = os.pread(fd, _LONGEST + 1, 0)
    if len(content) > _LONGEST or (not content.strip().isdigit() and content):
        raise OSError(errno.EINVAL, "is not a lock of Seatrial: it does not contain a pid", str(path))


def _is_still(path: Path, fd: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
