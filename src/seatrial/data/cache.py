"""A bounded folder of files that can be fetched again: what several processes of a node cache of an object store.

Every file is verified by its reader, so a damaged one counts as a cache miss. One process fetches a file, others that
need it wait (a lock on its unfinished form). Before a file is written, its size is added to a count that all processes
share; if that would exceed the limit, the least recently used files are removed until a tenth is free. A process that
dies leaves at most a count that is too high, which the next removal corrects.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from seatrial.base.errors import InputError
from seatrial.base.private import private_folder

_PART = ".part"
_USED = ".used"
_FREED = 0.9  # fraction of the limit that is left after a removal

Check = Callable[[bytes], str | None]


def cache_folder() -> Path:
    """The data folder of this user on this node: in TMPDIR or /tmp, which are local disks. Raises InputError."""
    return private_folder() / "stream"


class DiskCache:
    """Files by name in `folder`, together at most `limit` bytes; safe across threads, processes and forks."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def get(self, name: str, fetch: Callable[[], bytes], check: Check) -> bytes:
        """The content of `name`: from the folder if it is there and passes `check`, else from `fetch`.

        `fetch` must check its own result, which is kept. Raises what `fetch` raises, and InputError if the folder
        cannot be written to.
        """
        path = self.folder / name
        if (kept := self._kept(path, check)) is not None:
            return kept
        try:
            return self._fetch(path, fetch, check)
        except OSError as e:
            raise InputError(
                f"cannot keep streamed data in {self.folder}: {e.strerror or e}",
                hint="free some space there, or set a smaller data.cache_gb; its location follows TMPDIR",
            ) from e

    def _kept(self, path: Path, check: Check) -> bytes | None:
        try:
            data = path.read_bytes()
            if check(data) is not None:
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except OSError:
            return None  # removed meanwhile, or unreadable: it is fetched again
        return data

    def _fetch(self, path: Path, fetch: Callable[[], bytes], check: Check) -> bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + _PART)
        with _locked_file(part) as fd:
            try:
                if (kept := self._kept(path, check)) is not None:
                    return kept  # fetched by the previous holder of the lock
                data = fetch()
                if len(data) <= self.limit:
                    self._keep(data, fd, part, path)
                return data
            finally:
                if _is_at(fd, part):
                    part.unlink()  # the fetch failed, and it is ours: we hold its lock

    def _keep(self, data: bytes, fd: int, part: Path, path: Path) -> None:
        # Written under the lock of the count: a process that recounts must see all files counted before.
        with _locked_file(self.folder / _USED) as count:
            used = int.from_bytes(os.pread(count, 8, 0), "little")
            if used + len(data) > self.limit:
                used = self._remove_old(min(int(self.limit * _FREED), self.limit - len(data)))
            os.pwrite(count, (used + len(data)).to_bytes(8, "little"), 0)
            _write(fd, data)
            os.rename(part, path)

    def _remove_old(self, target: int) -> int:
        """Remove the oldest files until `target` bytes are left; returns the bytes left."""
        found: list[tuple[int, int, str]] = []
        for path in _files(self.folder):
            if path.endswith(_PART):
                _remove_dead(path)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[int]:
    """A descriptor of the file at `path`, locked exclusively; the file is verified to still have this name."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                yield fd
                return
        finally:
            os.close(fd)


def _is_at(fd: int, path: str | Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_dead(part: str) -> None:
    """Remove an unfinished file whose writer has died, so that its lock is free."""
    with contextlib.suppress(OSError):
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, part):
                os.unlink(part)
        finally:
            os.close(fd)


def _write(fd: int, data: bytes) -> None:
    os.ftruncate(fd, 0)
    done, view = 0, memoryview(data)
    while done < len(view):
        done += os.pwrite(fd, view[done:], done)


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name != _USED:
                yield os.path.join(parent, name)
