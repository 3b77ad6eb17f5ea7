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
from seatrial.storage.errors import StorageError, telling
from seatrial.storage.names import PARTIAL, check_name, check_prefix
from seatrial.storage.objects import Entry, Progress, Readable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPIED_AT_ONCE = 64 * 2**20  # bytes between two reports of progress
_LONGEST_CONTEST_S = 10.0
_ABSENT = (FileNotFoundError, NotADirectoryError)


class LocalStore:
    """Objects are the files below a folder, their names the paths.

    A file is written under another name in its folder, made durable and renamed. Calls take as long as the file system
    takes: a hard-mounted NFS whose server is gone holds them for ever, so whoever must not wait calls from another
    process.
    """

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        """`create` makes the folder. Raises StorageError if that fails."""
        self.root = Path(os.path.abspath(folder))
        if create:
            with telling("make", self.url):
                self.root.mkdir(parents=True, exist_ok=True)
        # What was there once and is not any more has vanished: another thing than a wrong path.
        self._was_there = self.root.is_dir()
        self._was_mounted = self._was_there and os.path.ismount(self.root)

    @property
    def url(self) -> str:
        return str(self.root)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with telling("look at", str(path)):
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
                        "read", path, f"has {offset + length} bytes, asked for those from {offset} on"
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
                # Within the kernel: nothing is copied into this process.
                n = os.sendfile(fd, source.fd, source.offset + done, min(_COPIED_AT_ONCE, source.size - done))
                if n == 0:
                    raise _short("write", path, f"its source ends after {done} of {source.size} bytes")
                done += n
                if progress is not None:
                    progress(done, source.size)

        self._put(path, fill, if_absent=False)

    def names(self, prefix: str = "") -> list[Entry]:
        folder = self._below(prefix)
        with telling("list", str(folder)):
            self._check_root("list", folder)
            found: list[Entry] = []
            self._walk(folder, found)
        return sorted(found, key=lambda entry: entry.name)

    def children(self, prefix: str = "") -> list[str]:
        folder = self._below(prefix)
        with telling("list", str(folder)):
            self._check_root("list", folder)
            try:
                return sorted(name for name in os.listdir(folder) if not name.startswith(PARTIAL))
            except _ABSENT:
                return []

    def remove(self, names: Iterable[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            path = self._path(name)
            with telling("remove", str(path)):
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
        with telling("clean up", str(folder)):
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
        """Raise where the store's own folder is not what it was. Without that, an absent object is absent."""
        hint = "is it on a mount that has gone?"
        if not self.root.is_dir():
            if self._was_there:
                raise StorageError(
                    "unreachable", operation, str(path), f"the folder {self.root} has vanished", hint=hint
                )
            raise StorageError("missing", operation, str(path), f"there is no folder {self.root}", hint=hint)
        # What is written into an empty mount point fills the wrong disk, and is hidden by the next mount.
        if self._was_mounted and not os.path.ismount(self.root):
            raise StorageError(
                "unreachable", operation, str(path), f"nothing is mounted at {self.root} any more", hint=hint
            )

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        with telling("read", str(path)):
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
        with telling("write", str(path)):
            self._check_root("write", path)
            temporary, fd = self._temporary(path.parent)
            try:
                try:
                    fill(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)  # where NFS may tell of a full disk
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
        """A new file in `folder`, which is made durably where it is not there."""
        # A folder that is empty for a moment may be removed by `remove` of another process.
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
                    status = entry.stat()
                    name = os.path.relpath(entry.path, self.root)
                    found.append(Entry(name, status.st_size, status.st_mtime))
            except FileNotFoundError:
                continue  # removed while we look

    def _remove_if_empty(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or somebody else was first
                return
            folder = folder.parent


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        # "exists" would say that somebody else has written the object.
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from None
    fsync_folder(folder.parent)


def _raise(error: OSError) -> None:
    """For os.walk, which takes no notice of what it cannot read. A folder that is not there has nothing in it."""
    if not isinstance(error, _ABSENT):
        raise error


def _fill(fd: int, path: Path, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise _short(
                "read", path, f"ends at {offset + done}, asked for {len(view)} bytes from {offset} on"
            )
        done += n


def _short(operation: str, path: Path, cause: str) -> StorageError:
    return StorageError("short", operation, str(path), cause)


def _link(temporary: Path, path: Path) -> None:
    """Give the file at `temporary` the name `path` too, if that is free. Raises OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS: the server may have done it, and its answer been lost; the second attempt then finds our own link.
        if os.stat(temporary).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise StorageError(
                "other",
                "write",
                str(path),
                "its file system has no hard links, which are what makes it safe to write a file only if it is absent",
                hint="use another file system or an object store",
                errno=error.errno,
            ) from error
        raise
