"""The source of one checkpoint's file contents: a folder, or keys of an object store."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Protocol

from seatrial.base.files import open_file
from seatrial.checkpoint.manifest import Damaged, lost_or_refused
from seatrial.storage import StorageError, Store


class Source(Protocol):
    """The files of one checkpoint, by their names in its manifest. Several threads may read.

    Raises Damaged if a file is missing, too short, or its disk cannot read it back; StorageError if the storage
    does not answer or refuses.
    """

    where: str  # path or address, for messages
    threads: int  # number of concurrent reads that is useful

    def size(self, file: str) -> int:
        """Bytes of a file."""
        ...

    def read_into(self, file: str, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` with the file's bytes starting at `offset`."""
        ...

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        ...


class FolderSource:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)
        self.threads = min(4, len(os.sched_getaffinity(0)))
        self._fds: dict[str, int] = {}
        self._opening = threading.Lock()

    def size(self, file: str) -> int:
        try:
            return os.fstat(self._fd(file)).st_size
        except OSError as error:
            raise self._error(file, error) from None

    def read_into(self, file: str, buffer: memoryview, offset: int) -> None:
        try:
            fd = self._fd(file)
            while buffer:
                n = os.preadv(fd, [buffer], offset)
                if n == 0:
                    raise Damaged(f"{self.folder / file} ends after {offset} bytes")
                buffer, offset = buffer[n:], offset + n
        except OSError as error:
            raise self._error(file, error) from None

    def close(self) -> None:
        with self._opening:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _fd(self, file: str) -> int:
        with self._opening:
            if file not in self._fds:
                self._fds[file] = open_file(self.folder / file, links=True)
            return self._fds[file]

    def _error(self, file: str, error: OSError) -> Damaged | StorageError:
        path = self.folder / file
        if error.errno == errno.ENOENT and self.folder.is_dir():
            return Damaged(f"{path} is missing")
        return lost_or_refused(path, error)


class StoreSource:
    """Objects of a store under one key prefix."""

    def __init__(self, store: Store, key: str) -> None:
        self.where = f"{store.url}/{key}"
        self.threads = 8  # each mostly waits for the network
        self._store, self._key = store, key

    def size(self, file: str) -> int:
        size = self._store.size(f"{self._key}/{file}")
        if size is None:
            raise Damaged(f"{self.where}/{file} is missing")
        return size

    def read_into(self, file: str, buffer: memoryview, offset: int) -> None:
        try:
            self._store.read_into(f"{self._key}/{file}", buffer, offset)
        except StorageError as error:
            if error.kind in ("missing", "short"):
                raise Damaged(f"{self.where}/{file} is not all there: {error.cause}") from None
            raise

    def close(self) -> None:
        pass
