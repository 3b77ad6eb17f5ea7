"""Opening files that others may have put there: only what is a regular file, never a wait, never more than belongs there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from seatrial.base import units

# Far above any record that is read as a whole: the manifest of a checkpoint of a thousand ranks has some tens of MiB.
LARGEST_BYTES = 256 << 20
_LARGEST_NAMED_BYTES = 64 << 20

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFile(OSError):
    """What stands there is no regular file; `strerror` says what it is."""


def open_file(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """A descriptor of the regular file at `path`, made with mode 644 where `flags` say so.

    NotAFile for anything else, a link among it: whoever made the link would choose what we read, or overwrite. With
    `links` they are followed, for what belongs to the user or is verified by its hash.
    """
    with contextlib.suppress(FileNotFoundError):  # open() says so, or makes it
        # Before it is opened: that alone waits at a pipe, and a device may take it as an order.
        _check(path, os.stat(path, follow_symlinks=links))
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    fd = os.open(path, flags, 0o644)
    try:
        _check(path, os.fstat(fd))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise NotAFile(errno.EINVAL, f"is {what}, not a regular file", str(path))


def not_a_file(path: Path) -> NotAFile | None:
    """What `open_file` would object to; None where it is a regular file, is not there, or cannot be looked at."""
    try:
        _check(path, os.lstat(path))
    except NotAFile as error:
        return error
    except OSError:
        pass
    return None


def read_bytes(path: Path, *, most: int = LARGEST_BYTES, links: bool = False) -> bytes:
    """All of a regular file. Raises OSError, also where it has more than `most` bytes: then it is not what it should be."""
    with open(open_file(path, links=links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {units.memory(size)}, more than such a file can have", str(path))
        return file.read()


def read_named(path: Path) -> bytes:
    """All of what the user has named: a file, or a pipe, as the shell's <(...) is one. Raises OSError.

    Of a device that never ends not more than a file of that kind can have.
    """
    with open(path, "rb") as file:
        data = file.read(_LARGEST_NAMED_BYTES + 1)
    if len(data) > _LARGEST_NAMED_BYTES:
        raise OSError(errno.EFBIG, "is larger than such a file can be", str(path))
    return data


def read_text(path: Path, *, most: int = LARGEST_BYTES, links: bool = False) -> str:
    """As `read_bytes`; ValueError for what is no UTF-8."""
    return read_bytes(path, most=most, links=links).decode("utf-8")


def read_json(path: Path, *, links: bool = False) -> Any:
    """The JSON document in a regular file. Raises OSError; ValueError where it is none."""
    return parse_json(read_bytes(path, links=links))


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with ValueError for everything that it refuses, too deep a nesting too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`, with ValueError for everything that it refuses, too deep a nesting too."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
