"""New lines of a kernel log: /dev/kmsg, or a file or FIFO used instead of it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from seatrial.base.kernel_files import KMSG_RECORD_BYTES

_RECORDS_AT_ONCE = 1000  # a flood of messages must not block the reader's other work
_FILE_BYTES = 1 << 20
_LONGEST_LINE = 8192


class KernelLog:
    """Follows a kernel log from its end, without ever blocking.

    `problem` states why it cannot be read, and is None while it can. A file that appears later is followed from its
    first line: all of it is new. One that was truncated or replaced is followed from its new beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self.lost = 0  # times that the kernel has overwritten messages before they were read here
        self._fd = -1
        self._rest = b""
        self._kind: int = 0  # of file; 0 while there is none
        self._inode: tuple[int, int] | None = None
        self._open(at_end=True)

    def fileno(self) -> int | None:
        """The descriptor that becomes readable with new lines; None for a plain file, or if it is not open."""
        return None if self._fd < 0 or self._kind == stat.S_IFREG else self._fd

    @property
    def silent(self) -> bool:
        """Whether it must be polled for new lines: a plain file, or one that does not exist yet."""
        return self._kind in (0, stat.S_IFREG)

    def lines(self) -> list[str]:
        """The lines that were added since the last call."""
        if self.silent:
            self._follow()
        if self._fd < 0:
            return []
        if self._kind == stat.S_IFCHR:
            return self._records()
        return self._split(self._read(_FILE_BYTES))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, *, at_end: bool) -> None:
        try:
            found = os.stat(self.path)
            kind = stat.S_IFMT(found.st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR):
                raise OSError(errno.EINVAL, "it is neither a file, a FIFO nor a device")
            # Without a writer a FIFO would always be readable, but empty: so we open it as one of its writers.
            way = os.O_RDWR if kind == stat.S_IFIFO else os.O_RDONLY
            fd = os.open(self.path, way | os.O_NONBLOCK | os.O_CLOEXEC)
            if at_end and kind != stat.S_IFIFO:
                with contextlib.suppress(OSError):  # some character devices cannot seek to an end
                    os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror}"
            if not isinstance(error, FileNotFoundError):
                self._kind = stat.S_IFCHR  # it exists but cannot be opened, and a retry would not help
            return
        self.problem, self._fd, self._kind, self._rest = None, fd, kind, b""
        self._inode = (found.st_dev, found.st_ino)

    def _follow(self) -> None:
        """Open the file if it has appeared or was replaced; go to its start if it was truncated."""
        try:
            found = os.stat(self.path)
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._inode:
            self.close()
            self._open(at_end=False)
        elif found.st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._rest = b""

    def _records(self) -> list[str]:
        """/dev/kmsg gives one record a read: "priority,number,microseconds,flags;text", then lines of details."""
        lines = []
        for _ in range(_RECORDS_AT_ONCE):
            try:
                record = os.read(self._fd, KMSG_RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    self._fail(error)
                    break
                self.lost += 1
                continue
            if not record:
                break
            lines.append(record.decode(errors="replace").partition("\n")[0])
        return lines

    def _read(self, n_bytes: int) -> bytes:
        try:
            return os.read(self._fd, n_bytes)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._fail(error)
            return b""

    def _fail(self, error: OSError) -> None:
        self.problem = f"{self.path} cannot be read any more: {error.strerror}"
        self.close()
        self._inode = None

    def _split(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = self._rest[:_LONGEST_LINE]  # the rest of an overlong line is ignored
        return [line.decode(errors="replace") for line in lines]
