"""The exception of all stores: one type with a kind, for folders and object stores."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, Literal

from seatrial.base.errors import HINTS, SeatrialError

# missing      the object, the bucket or the folder does not exist
# denied       no credentials, or insufficient ones; no permission; a read-only file system
# full         no space, or a quota is used up
# unreachable  the service or the file system does not answer, or has failed; a retry may succeed
# exists       `if_absent`, and the object exists
# short        the object, or the source of an upload, ends before the requested bytes
# other        the rest; the message is the service's or the kernel's
Kind = Literal["missing", "denied", "full", "unreachable", "exists", "short", "other"]


class StorageError(SeatrialError):
    """A store failed an operation. What was there before is untouched.

    `kind` determines what to do about it; `operation` was attempted on `url`; `cause` is why it failed.
    `errno` is the kernel's error number if the kernel reported one, else None.
    """

    def __init__(
        self,
        kind: Kind,
        operation: str,
        url: str,
        cause: str,
        *,
        hint: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(f"cannot {operation} {url}: {cause}", hint=hint)
        self.kind: Kind = kind
        self.operation = operation
        self.url = url
        self.cause = cause
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling rebuilds an exception from its message only, not from this constructor's arguments: returning it
        # from a process pool would fail.
        return _rebuild, (self.kind, self.operation, self.url, self.cause, self.hint, self.errno)


def _rebuild(
    kind: Kind, operation: str, url: str, cause: str, hint: str | None, number: int | None
) -> StorageError:
    return StorageError(kind, operation, url, cause, hint=hint, errno=number)


_KINDS: dict[int, Kind] = {
    errno.ENOENT: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EEXIST: "exists",
    # A network file system whose server, or a disk whose cable, was disconnected.
    **dict.fromkeys(
        (
            errno.EIO,
            errno.ESTALE,
            errno.ENXIO,
            errno.ENODEV,
            errno.ENOTCONN,
            errno.ETIMEDOUT,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENETDOWN,
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.EREMOTEIO,
            errno.ESHUTDOWN,
            errno.ENOMEDIUM,
        ),
        "unreachable",
    ),
}


def from_os_error(operation: str, url: str, error: OSError) -> StorageError:
    """Convert an OSError to a StorageError; `kind` follows from its errno."""
    number = error.errno
    cause = error.strerror or str(error) or type(error).__name__
    if number is None:
        return StorageError("other", operation, url, cause)
    name = errno.errorcode.get(number, str(number))
    return StorageError(
        _KINDS.get(number, "other"),
        operation,
        url,
        f"{cause} ({name})",
        hint=HINTS.get(number),
        errno=number,
    )


@contextlib.contextmanager
def as_storage_error(operation: str, url: str) -> Iterator[None]:
    """Convert any OSError raised inside to a StorageError of `operation` on `url`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(operation, url, error) from error
