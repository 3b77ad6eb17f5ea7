"""The interface of a store, and opening one by its address."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from seatrial.base.errors import InputError
from seatrial.storage.errors import StorageError
from seatrial.storage.local import LocalStore
from seatrial.storage.names import FILE, S3, check_prefix, is_remote
from seatrial.storage.objects import Entry, Progress, Readable
from seatrial.storage.s3 import S3Store

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Store(Protocol):
    """Objects by name. Every method raises StorageError, with the object's address and the reason.

    A name is a relative path with "/" between its parts: "step-00000500/g7/rank-00000.safetensors". A prefix is a name
    without an object, or "" for all of the store: it stands for what lies below it, so "step-1" does not include
    "step-10". A store is thread-safe, and may be used by a process forked from the one that opened it.
    """

    @property
    def url(self) -> str:
        """The store's own address: an absolute path or s3://BUCKET/PREFIX."""
        ...

    def size(self, name: str) -> int | None:
        """Size in bytes; None if the object does not exist. An unreachable store is an error, not an absent object."""
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes starting at `offset`, or all to the end. Fewer are an error (short)."""
        ...

    def read_into(self, name: str, buffer: Buffer, offset: int = 0) -> None:
        """Fill all of `buffer` (writable, contiguous) with the bytes starting at `offset`. Fewer are an error (short).

        After an error the buffer's content is undefined.
        """
        ...

    def write(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Make `data` the object's content, atomically and durably.

        `if_absent`: raises `exists` if the object exists; of several concurrent writers exactly one succeeds.
        """
        ...

    def upload(self, name: str, source: Readable, *, progress: Progress | None = None) -> None:
        """As `write`, with the bytes of a descriptor, of any size, in bounded memory. No reader sees a part of it."""
        ...

    def names(self, prefix: str = "") -> list[Entry]:
        """All objects below `prefix`, by name; an empty list if there are none."""
        ...

    def children(self, prefix: str = "") -> list[str]:
        """First components of all names below `prefix`, unique and sorted, like a folder's listing."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; absent ones are ignored."""
        ...

    def remove_leftovers(self, prefix: str = "") -> list[str]:
        """Remove what crashed writers left below `prefix`: unfinished files, incomplete uploads.

        Returns descriptions of what was removed. Only while nothing is being written below `prefix`.
        """
        ...


# Amazon S3's rules; other services have stricter ones.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


def open_store(url: str) -> Store:
    """The store at `url`: a path, file:///PATH, or s3://BUCKET/PREFIX. Does not contact the service yet.

    A folder must exist when it is read or written, so that a missing mount is not mistaken for an empty
    folder and written into. Raises InputError if `url` is not a valid address, or boto3 is missing.
    """
    if not is_remote(url):
        path = url.removeprefix(FILE)
        if not path:
            raise InputError("the address of a store is empty", hint="give a path, or s3://BUCKET/PREFIX")
        return LocalStore(path)
    if not url.startswith(S3):
        raise InputError(
            f"{url}: not an address of a store",
            hint="give a path or s3://BUCKET/PREFIX; the endpoint of an S3-compatible service is AWS_ENDPOINT_URL",
        )
    bucket, _, prefix = url.removeprefix(S3).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InputError(
            f"{url}: {bucket!r} is not a bucket's name",
            hint="an address is s3://BUCKET/PREFIX; a bucket has 3 to 63 of a-z, 0-9, '-' and '.'",
        )
    try:
        prefix = check_prefix(S3 + bucket, prefix)
    except StorageError as error:
        raise InputError(f"{url}: {error.cause}", hint="an address is s3://BUCKET/PREFIX") from error
    if importlib.util.find_spec("boto3") is None:
        raise InputError(f"{url}: object stores need boto3", hint="pip install 'seatrial[s3]'")
    return S3Store(bucket, prefix)
