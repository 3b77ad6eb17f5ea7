"""Open files safely: regular files only, never blocking, with a size limit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.base import units

# Far above any record that is read as a whole: the manifest of a checkpoint with a thousand ranks is tens of MiB.
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
    """The path is not a regular file; `strerror` says what it is."""


def open_file(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """Open the regular file at `path` and return its descriptor; created with mode 644 if `flags` has O_CREAT.

    Raises NotAFile for anything else, including links: the link's creator would choose what is read or overwritten.
    `links` follows them, for files that belong to the user or are verified by hash.
    """
    with contextlib.suppress(FileNotFoundError):  # open() reports it, or creates it
        # Check before opening: opening a pipe blocks, and opening a device can have side effects.
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
    """Why `open_file` would refuse this path; None if it is a regular file, missing, or cannot be examined."""
    try:
        _check(path, os.lstat(path))
    except NotAFile as error:
        return error
    except OSError:
        pass
    return None


def names_in(folder: Path) -> list[str]:
    """The names in `folder`; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_bytes(path: Path, *, most: int = LARGEST_BYTES, links: bool = False) -> bytes:
    """Read a regular file. Raises OSError, also if it is larger than `most` bytes."""
    with open(open_file(path, links=links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {units.memory(size)}, more than such a file may have", str(path))
        return file.read()


def read_named(path: Path) -> bytes:
    """Read a file or pipe named by the user, such as the shell's <(...). Raises OSError.

    Reads at most `_LARGEST_NAMED_BYTES`, because a device may be endless.
    """
    with open(path, "rb") as file:
        data = file.read(_LARGEST_NAMED_BYTES + 1)
    if len(data) > _LARGEST_NAMED_BYTES:
        raise OSError(errno.EFBIG, "is larger than such a file can be", str(path))
    return data


def read_text(path: Path, *, most: int = LARGEST_BYTES, links: bool = False) -> str:
    """As `read_bytes`, decoded as UTF-8; raises ValueError if it is not UTF-8."""
    return read_bytes(path, most=most, links=links).decode("utf-8")


def read_json(path: Path, *, links: bool = False) -> Any:
    """Parse the JSON document in a regular file. Raises OSError; ValueError if it is not JSON."""
    return parse_json(read_bytes(path, links=links))


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but every failure is a ValueError, including nesting that is too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`, but every failure is a ValueError, including nesting that is too deep."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys: {"model.hidden_size": 64}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
