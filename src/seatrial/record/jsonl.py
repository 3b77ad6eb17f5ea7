"""JSON Lines files: appended to by processes that may die, read by processes that must not.

A line is written by one `write` to a descriptor opened with O_APPEND, so lines of several writers do not mix.
A crash can leave the last line torn; the next writer starts a new line first, and readers report the torn one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from seatrial.base.files import open_file, parse_json

_LONGEST_LINE = 16 << 20  # bytes; far longer than any record
# From here on it pays to import what parses lines in bulk; less than the shortest piece.
_BULK_BYTES = 240 << 10
PIECE_BYTES = 4 << 20  # read at once


@dataclass(frozen=True)
class Problem:
    """A line that could not be used; every other line of the file still is."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def piece_bytes(left: int) -> int:
    """How many of `left` bytes every reader from the beginning takes at once; 0: fewer than a piece has.

    A piece at the end of a file has two parts, and grows by one: what follows it is never as much as two.
    """
    part = PIECE_BYTES // 32
    if left >= PIECE_BYTES:
        return PIECE_BYTES
    return left // part * part if left >= 2 * part else 0


def plain(value: Any) -> Any:
    """`value` with NaN and the infinities, which JSON does not support, as "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def encode(value: Mapping[str, Any]) -> bytes:
    """One line with its newline."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a non-finite float
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate (an undecodable file name in a message) must not lose the event.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


class LineWriter:
    """Appends to one file through one open descriptor; nothing is durable before `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Readable too: the last byte must be read.
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._torn = _ends_torn(self._fd)

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one line. Raises OSError if the write fails (a full disk), or the file was moved or deleted."""
        if not self._in_place():
            raise FileNotFoundError(errno.ENOENT, "was moved or deleted while it was written", str(self.path))
        data = encode(value)
        if self._torn:
            data = b"\n" + data
        self._torn = True  # until all of it is known to be written
        while data:
            data = data[os.write(self._fd, data) :]
        self._torn = False

    def _in_place(self) -> bool:
        """Whether the path still names the open file: a run folder that was moved takes its files with it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Fsync what was written."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one line to `path`, for infrequent writers; others keep a LineWriter."""
    with LineWriter(path) as writer:
        writer.write(value)


def read(path: Path) -> tuple[list[dict[str, Any]], list[Problem]]:
    """All usable objects of `path`, and the problems of its other lines; a missing file counts as empty."""
    numbered, problems = read_numbered(path)
    return [value for _, value in numbered], problems


def read_numbered(
    path: Path, noun: str = "a record"
) -> tuple[list[tuple[int, dict[str, Any]]], list[Problem]]:
    """As `read`, each object with its line number (from 1); `noun` names what a line should be."""
    problems: list[Problem] = []
    return list(each_numbered(path, noun, problems)), problems


def each_numbered(path: Path, noun: str, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `read_numbered`, one object at a time without keeping any; unusable lines are added to `problems`."""
    try:
        with open(open_file(path), "rb") as f:
            for number, line in enumerate(_lines(f), 1):
                # Accept a complete object without its newline; the next writer adds the newline.
                value, reason = _parse_line(line)
                if value is not None:
                    yield number, value
                elif reason is not None:
                    whole = line.endswith(b"\n")
                    what = f"not {noun} ({reason})" if whole else f"unfinished line, not used ({reason})"
                    problems.append(Problem(path.name, number, what))
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(Problem(path.name, 0, f"cannot be read ({error.strerror})"))


class Tail:
    """Follows a file that others append to; a line counts once its newline has been written."""

    def __init__(
        self,
        path: Path,
        noun: str = "a record",
        *,
        recent_bytes: int | None = None,
        always: re.Pattern[bytes] | None = None,
        begin: int = 0,
        unwanted: bytes | None = None,
    ) -> None:
        """`recent_bytes`: before the last `recent_bytes` bytes, parse only lines that match `always`.

        Without `always` that part is not read at all, and the lines have no numbers (0). `begin`: the `offset` of an earlier
        reader of the same file, to continue there. `unwanted`: of much data at once, lines with it are not parsed.
        """
        self.path = path
        self.noun = noun
        self.problems: list[Problem] = []
        self.opened = 0  # number of files opened so far: a replaced file is read from its beginning
        self._recent_bytes, self._always, self._unwanted = recent_bytes, always, unwanted
        self._recent = 0  # from this offset on every line is parsed
        self._offset = begin
        self._lines, self._numbered = 0, 0 if begin else 1
        self._inode: int | None = None
        self._unreadable = False

    @property
    def offset(self) -> int:
        """Where the lines end that were read so far, in bytes."""
        return self._offset

    def poll(self) -> list[dict[str, Any]]:
        """The objects whose lines were completed since the last call; unusable lines go to `problems`."""
        return [value for _, value in self.poll_numbered()]

    def poll_numbered(self) -> list[tuple[int, dict[str, Any]]]:
        """As `poll`, each object with its line number (from 1)."""
        return [item for part in self.parts() for item in part]

    def parts(
        self, bulk: Callable[[bytearray], int] | None = None
    ) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """As `poll_numbered`, a few MiB at a time, to bound memory.

        `bulk` may take much data as a whole: it returns the number of its lines, or 0 if it did not. It must not keep
        the data, whose memory is used again.
        """
        data = bytearray()
        while self._read(data):
            begin = self._offset
            self._offset += len(data)
            much = len(data) >= _BULK_BYTES
            if bulk is not None and much and begin >= self._recent and (taken := bulk(data)):
                self._lines += self._numbered * taken
                continue
            values = []
            lines = bytes(data).split(b"\n")
            del lines[-1]
            older = data.count(b"\n", 0, max(0, self._recent - begin))
            always = self._always.search if self._always is not None else None
            unwanted = self._unwanted if much else None
            for place, line in enumerate(lines):
                if (unwanted is not None and unwanted in line) or (
                    place < older and always is not None and not always(line)
                ):
                    continue
                number = self._lines + self._numbered * (place + 1)
                value, reason = _parse_line(line)
                if value is not None:
                    values.append((number, value))
                elif reason is not None:
                    self.problems.append(Problem(self.path.name, number, f"not {self.noun} ({reason})"))
            self._lines += self._numbered * len(lines)
            del lines  # as long as the caller works
            yield values

    def rest(self) -> list[tuple[int, dict[str, Any]]]:
        """The object after the last newline, once the file has no writer; an invalid one becomes a problem."""
        torn = bytearray()
        if not self._read(torn, torn=True) or b"\n" in torn:  # a new start is writing
            return []
        self._offset += len(torn)  # the next writer begins with a newline, so this stays the same line
        value, reason = _parse_line(bytes(torn))
        if value is not None:
            return [(self._lines + self._numbered, value)]
        if reason is not None:
            what = f"unfinished line, not used ({reason})"
            self.problems.append(Problem(self.path.name, self._lines + self._numbered, what))
        return []

    def _read(self, data: bytearray, *, torn: bool = False) -> bool:
        """Replace `data`, in its own memory, by the next complete lines, or with `torn` by what follows. False: nothing.

        New memory for each piece costs more than reading it.
        """
        try:
            with open(open_file(self.path), "rb") as f:
                status = os.fstat(f.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    if self._inode is not None or status.st_size < self._offset:
                        self._offset = 0
                    self._lines, self._inode = 0, status.st_ino
                    self.opened += 1
                    if self._recent_bytes is not None:
                        self._recent = max(0, status.st_size - self._recent_bytes)
                        if self._recent and self._always is None:
                            f.seek(self._recent - 1)
                            f.readline(_LONGEST_LINE)  # skip the rest of a partial line
                            self._offset, self._numbered = f.tell(), 0
                f.seek(self._offset)
                left = max(0, status.st_size - self._offset)  # what was appended since is read next time
                size = piece_bytes(left) or left
                del data[size:]
                data.extend(bytes(size - len(data)))
                del data[f.readinto(data) :]
                while b"\n" not in data and (more := f.read(PIECE_BYTES)):
                    data += more
                    if len(data) >= _LONGEST_LINE and b"\n" not in data:
                        raise _too_long()
        except FileNotFoundError:  # not there yet, or moved away
            return False
        except OSError as error:
            if not self._unreadable:
                self.problems.append(Problem(self.path.name, 0, f"cannot be read ({error.strerror})"))
            self._unreadable = True
            return False
        if not torn:
            del data[data.rfind(b"\n") + 1 :]
        return bool(data)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Each line, the last perhaps without its newline. OSError for an overlong line, such as 20 GB of zeros."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise _too_long()
        yield line


def _too_long() -> OSError:
    return OSError(errno.EFBIG, "a line exceeds the size of any record; the rest of the file is not read")


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _parse_line(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """(object, None), or (None, reason) if unusable, or (None, None) for an empty line, which is ignored."""
    if not line.strip():
        return None, None
    try:
        value = parse_json(line.removesuffix(b"\n").decode("utf-8"))
    except UnicodeDecodeError:
        return None, "not UTF-8 text"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except ValueError as error:  # a number or a nesting beyond Python's limits
        return None, f"not JSON: {error}"
    if not isinstance(value, dict):
        return None, f"a JSON {type(value).__name__} where an object is expected"
    return value, None
