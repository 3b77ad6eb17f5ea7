"""A folder as a store: local, or shared between nodes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.atomic import fsync_folder
from seatrial.storage.errors import StorageError, as_storage_error
from seatrial.storage.names import PARTIAL, check_name, check_prefix
from seatrial.storage.objects import Entry, Progress, Readable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPIED_AT_ONCE = 64 * 2**20  # bytes between two progress reports
_LONGEST_CONTEST_S = 10.0
_ABSENT = (FileNotFoundError, NotADirectoryError)


class LocalStore:
    """Objects are the files in a folder and its subfolders; their names are the relative paths.

    A file is written under a temporary name in its folder, fsynced and renamed. Calls block as long as the file system
    does, with a hard-mounted NFS whose server is down forever: callers that must not block use another process.
    """

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        """`create` creates the folder. Raises StorageError if that fails."""
        self.root = Path(os.path.abspath(folder))
        if create:
            with as_storage_error("make", self.url):
                self.root.mkdir(parents=True, exist_ok=True)
        # A root that existed and no longer does has vanished: a different error than a wrong path.
        self._was_there = self.root.is_dir()
        self._was_mounted = self._was_there and os.path.ismount(self.root)

    @property
    def url(self) -> str:
        return str(self.root)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with as_storage_error("look at", str(path)):
            try:
                found = os.stat(path)
            except _ABSENT:
                self._check_root("look at", path)
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path(name)
        with self._opened(path) as fd:
            if length is None:
                length = os.fstat(fd).st_size - offset
                if length < 0:
                    raise _short(
                        "read", path, f"has {offset + length} bytes, requested were those from {offset} on"
                    )
            out = bytearray(length)
            _fill(fd, path, memoryview(out), offset)
        return bytes(out)

    def read_into(self, name: str, buffer: Buffer, offset: int = 0) -> None:
        path = self._path(name)
        with self._opened(path) as fd:
            _fill(fd, path, memoryview(buffer).cast("B"), offset)

    def write(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        view = memoryview(data).cast("B")

        def fill(fd: int) -> None:
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])

        self._put(self._path(name), fill, if_absent=if_absent)

    def upload(self, name: str, source: Readable, *, progress: Progress | None = None) -> None:
        path = self._path(name)

        def fill(fd: int) -> None:
            done = 0
            while done < source.size:
                # Copied within the kernel, not through this process.
                n = os.sendfile(fd, source.fd, source.offset + done, min(_COPIED_AT_ONCE, source.size - done))
                if n == 0:
                    raise _short("write", path, f"its source ends after {done} of {source.size} bytes")
                done += n
                if progress is not None:
                    progress(done, source.size)

        self._put(path, fill, if_absent=False)

    def names(self, prefix: str = "") -> list[Entry]:
        folder = self._below(prefix)
        with as_storage_error("list", str(folder)):
            self._check_root("list", folder)
            found: list[Entry] = []
            self._walk(folder, found)
        return sorted(found, key=lambda entry: entry.name)

    def children(self, prefix: str = "") -> list[str]:
        folder = self._below(prefix)
        with as_storage_error("list", str(folder)):
            self._check_root("list", folder)
            try:
                return sorted(name for name in os.listdir(folder) if not name.startswith(PARTIAL))
            except _ABSENT:
                return []

    def remove(self, names: Iterable[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            path = self._path(name)
            with as_storage_error("remove", str(path)):
                try:
                    path.unlink()
                except _ABSENT:
                    self._check_root("remove", path)
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            self._remove_if_empty(folder)

    def remove_leftovers(self, prefix: str = "") -> list[str]:
        folder = self._below(prefix)
        removed = []
        with as_storage_error("clean up", str(folder)):
            self._check_root("clean up", folder)
            for parent, _, files in os.walk(folder, onerror=_raise):
                left = [Path(parent, name) for name in files if name.startswith(PARTIAL)]
                for path in left:
                    path.unlink(missing_ok=True)
                    removed.append(str(path))
                if left:
                    self._remove_if_empty(Path(parent))
        return sorted(removed)

    def _path(self, name: str) -> Path:
        return self.root / check_name(self.url, name)

    def _below(self, prefix: str) -> Path:
        return self.root / check_prefix(self.url, prefix)

    def _check_root(self, operation: str, path: Path) -> None:
        """Raise if the store's own folder or its mount is missing. If not, an absent object is really absent."""
        hint = "was it on a mount that is no longer there?"
        if not self.root.is_dir():
            if self._was_there:
                raise StorageError(
                    "unreachable", operation, str(path), f"the folder {self.root} has vanished", hint=hint
                )
            raise StorageError("missing", operation, str(path), f"there is no folder {self.root}", hint=hint)
        # Data written into an empty mount point fills the wrong disk, and is hidden by the next mount.
        if self._was_mounted and not os.path.ismount(self.root):
            raise StorageError(
                "unreachable", operation, str(path), f"nothing is mounted at {self.root} any more", hint=hint
            )

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        with as_storage_error("read", str(path)):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except _ABSENT:
                self._check_root("read", path)
                raise
            try:
                yield fd
            finally:
                os.close(fd)

    def _put(self, path: Path, fill: Callable[[int], None], *, if_absent: bool) -> None:
        with as_storage_error("write", str(path)):
            self._check_root("write", path)
            temporary, fd = self._temporary(path.parent)
            try:
                try:
                    fill(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)  # NFS may report a full disk here
                if if_absent:
                    _link(temporary, path)
                    temporary.unlink()
                else:
                    os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            fsync_folder(path.parent)

    def _temporary(self, folder: Path) -> tuple[Path, int]:
        """Create a temporary file in `folder`; missing folders are created durably."""
        # Another process's `remove` may delete a folder that is momentarily empty.
        end = time.monotonic() + _LONGEST_CONTEST_S
        while True:
            missing = []
            parent = folder
            while parent != self.root and not parent.is_dir():
                missing.append(parent)
                parent = parent.parent
            path = folder / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(6)}"
            try:
                for made in reversed(missing):
                    _make_folder(made)
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                self._check_root("write", path)
                if time.monotonic() > end:
                    raise

    def _walk(self, folder: Path, found: list[Entry]) -> None:
        try:
            entries = list(os.scandir(folder))
        except _ABSENT:
            return
        for entry in entries:
            try:
                if entry.name.startswith(PARTIAL):
                    continue
                if entry.is_dir():
                    self._walk(Path(entry.path), found)
                elif entry.is_file():
                    name = os.path.relpath(entry.path, self.root)
                    found.append(Entry(name, entry.stat().st_size))
            except FileNotFoundError:
                continue  # removed during the listing

    def _remove_if_empty(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or already removed by another process
                return
            folder = folder.parent


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        # FileExistsError would become "exists": that another writer has written the object.
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from None
    fsync_folder(folder.parent)


def _raise(error: OSError) -> None:
    """Error handler for os.walk, which ignores unreadable folders by default. A missing folder counts as empty."""
    if not isinstance(error, _ABSENT):
        raise error


def _fill(fd: int, path: Path, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise _short(
                "read", path, f"ends at {offset + done}, requested were {len(view)} bytes from {offset} on"
            )
        done += n


def _short(operation: str, path: Path, cause: str) -> StorageError:
    return StorageError("short", operation, str(path), cause)


def _link(temporary: Path, path: Path) -> None:
    """Hard-link the file at `temporary` to `path`, if that is free. Raises OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS: the server may have linked it and its reply been lost; the retry then finds our own link.
        if os.stat(temporary).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise StorageError(
                "other",
                "write",
                str(path),
                "its file system has no hard links, which are needed to write a file only if it is absent",
                hint="use another file system or an object store",
                errno=error.errno,
            ) from error
        raise
