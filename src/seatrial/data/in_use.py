"""Protect a token store from being replaced while a run trains on it: a shared flock on its manifest.

The kernel releases it however the process ends. It needs neither write permission nor a lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from seatrial.base.errors import RunFailed
from seatrial.data.manifest import MANIFEST
from seatrial.record.folder import RunFolder

_PATIENCE_S = 10.0  # for a writer that is moving a store into place


def hold(folder: Path) -> int:
    """Lock the store in `folder` against replacement; returns a descriptor that holds the lock until it is closed.

    The lock is shared. RunFailed if the store is being replaced; OSError if the file system has no locks.
    """
    path, deadline = folder / MANIFEST, time.monotonic() + _PATIENCE_S
    while True:
        # Missing: the old store has been moved away, and the new one is not yet in place.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except BlockingIOError:
                pass
            except OSError:
                os.close(fd)
                raise
            os.close(fd)
        if time.monotonic() > deadline:
            raise RunFailed(f"{folder} is being replaced", hint="wait until that is done")
        time.sleep(0.01)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock on the store in `folder`. RunFailed, naming the runs, if it is in use."""
    path = folder / MANIFEST
    if not path.exists():
        yield
        return
    fd = -1
    try:
        try:
            # Open for writing if permitted: NFS needs that for an exclusive lock.
            fd = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise RunFailed(
                f"{folder} is in use by {' and '.join(_holders(fd)) or 'a run, perhaps on another machine'}",
                hint="it was not replaced: wait for the run, stop it, or use another folder",
            ) from e
        except OSError as e:
            raise RunFailed(
                f"it is unknown whether a run uses {folder}: {e.strerror}", hint="use another folder"
            ) from e
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _holders(fd: int) -> list[str]:
    """The runs that hold a lock on the file at `fd`; processes for which no run is found."""
    wanted = os.fstat(fd)
    runs: list[str] = []
    processes: list[str] = []
    for pid in sorted(_locked_by(wanted.st_ino)):
        files = _open_files(pid)
        if files and not any(os.path.samestat(status, wanted) for _, status in files):
            continue  # same inode number on another device
        for path, _ in files:
            if path == (run := RunFolder(path.parent.parent)).lock:
                runs.append(f"the run {run.path} (process {pid})")
        processes.append(f"process {pid}")
    return runs or processes


def _locked_by(inode: int) -> set[str]:
    """Processes with an flock on this inode, on any device: overlayfs reports another device number than it locks."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  READ  PID MAJOR:MINOR:INODE 0 EOF; waiting locks have -> in place of FLOCK
    words = [line.split() for line in lines]
    return {w[4] for w in words if len(w) > 5 and w[1] == "FLOCK" and w[5].endswith(f":{inode}")}


def _open_files(pid: str) -> list[tuple[Path, os.stat_result]]:
    """The open files of a process; empty if it has ended, or belongs to another user."""
    found: list[tuple[Path, os.stat_result]] = []
    with contextlib.suppress(OSError):
        for link in Path("/proc", pid, "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append((Path(os.readlink(link)), link.stat()))
    return found
