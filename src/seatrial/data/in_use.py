"""Nobody replaces a token store while a run trains on it: an flock on its manifest, shared by all who read.

The kernel drops it however its holder ends. It needs no right to write, and no file of its own.
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

_PATIENCE_S = 10.0  # with somebody who moves a store into place


def hold(folder: Path) -> int:
    """A descriptor that keeps the store in `folder` from being replaced until it is closed.

    Several may hold one store. RunFailed where somebody is replacing it; OSError where the file system has no locks.
    """
    path, deadline = folder / MANIFEST, time.monotonic() + _PATIENCE_S
    while True:
        # Not there: the old store has been moved away, and the new one not yet into its place.
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
    """While this lasts nobody holds the store in `folder`. RunFailed, which names the runs, where somebody does."""
    path = folder / MANIFEST
    if not path.exists():
        yield
        return
    fd = -1
    try:
        try:
            # For writing where that is allowed: NFS has no other exclusive locks.
            fd = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise RunFailed(
                f"{folder} is in use by {' and '.join(_holders(fd)) or 'a run, perhaps on another machine'}",
                hint="it stays as it is: wait for the run, stop it, or take another folder",
            ) from e
        except OSError as e:
            raise RunFailed(
                f"it cannot be told whether a run uses {folder}: {e.strerror}", hint="take another folder"
            ) from e
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _holders(fd: int) -> list[str]:
    """The runs that have locked the file at `fd`; processes where no run can be told."""
    wanted = os.fstat(fd)
    runs: list[str] = []
    processes: list[str] = []
    for pid in sorted(_locked_by(wanted.st_ino)):
        files = _open_files(pid)
        if files and not any(os.path.samestat(status, wanted) for _, status in files):
            continue  # a file of that number on another device
        for path, _ in files:
            if path == (run := RunFolder(path.parent.parent)).lock:
                runs.append(f"the run {run.path} (process {pid})")
        processes.append(f"process {pid}")
    return runs or processes


def _locked_by(inode: int) -> set[str]:
    """Processes with an flock on a file of that number, on any device: overlays have others than they show."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  READ  PID MAJOR:MINOR:INODE 0 EOF; with -> in place of FLOCK where it waits
    words = [line.split() for line in lines]
    return {w[4] for w in words if len(w) > 5 and w[1] == "FLOCK" and w[5].endswith(f":{inode}")}


def _open_files(pid: str) -> list[tuple[Path, os.stat_result]]:
    """What a process has open; nothing where it has ended, or is somebody else's."""
    found: list[tuple[Path, os.stat_result]] = []
    with contextlib.suppress(OSError):
        for link in Path("/proc", pid, "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append((Path(os.readlink(link)), link.stat()))
    return found
