"""Addresses of stores, and object names in them."""

from __future__ import annotations

import os

from seatrial.storage.errors import StorageError

S3 = "s3://"
FILE = "file://"

# The prefix of files being written. No object may have such a name: it would be taken for a leftover.
PARTIAL = ".partial-"

_MOST_NAME_BYTES = 900  # S3 allows 1,024 for the store's prefix and the name together


def is_remote(url: str) -> bool:
    """Whether `url` is an address of an object store, not a local path."""
    return "://" in url and not url.startswith(FILE)


def join(url: str, *parts: str) -> str:
    """The address of `parts` below `url`, which is a path or an s3:// address."""
    if is_remote(url):
        return "/".join([url.rstrip("/") if not url.endswith("://") else url, *parts])
    return os.path.join(url, *parts)


def check_name(url: str, name: str) -> str:
    """`name`, if it is valid for an object of the store at `url`. Raises StorageError (other).

    A name is a relative path with "/" between its parts. Names come from manifests, which may be damaged or made by
    others: none of them may lead out of the store.
    """
    problem = _problem(name)
    if problem is not None:
        raise StorageError("other", "use the name", f"{name!r} in {url}", problem)
    return name


def check_prefix(url: str, prefix: str) -> str:
    """`prefix` without its trailing "/", if it is "" (all of the store) or a name. Raises StorageError (other)."""
    return prefix and check_name(url, prefix.removesuffix("/"))


def _problem(name: str) -> str | None:
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        return "it has a control character"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "it is not text"
    if length > _MOST_NAME_BYTES:
        return f"it is {length} bytes long; at most {_MOST_NAME_BYTES} can be"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"it has a part {part!r}"
        if part.startswith(PARTIAL):
            return f"{PARTIAL}... is reserved for files that are being written"
    return None
