"""What a store raises: one error, with its kind, for folders and object stores alike."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, Literal

from seatrial.base.errors import HINTS, SeatrialError

# missing      the object, the bucket or the folder is not there
# denied       no credentials, or not these; no permission; a read-only file system
# full         no space, or a quota used up
# unreachable  the service or the file system does not answer, or has failed; another attempt may succeed
# exists       `if_absent`, and there is one
# short        the object, or what was to be uploaded, ends before the bytes that were asked for
# other        the rest; the message has the service's or the kernel's words
Kind = Literal["missing", "denied", "full", "unreachable", "exists", "short", "other"]


class StorageError(SeatrialError):
    """A store could not do what it was asked to. What was there before is untouched.

    `kind` says what to do about it, `operation` and `url` what was tried on what, `cause` why it failed. `errno` is the
    kernel's number where the kernel said it, else None.
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
        # An exception is rebuilt from its message, which is not what this one is made of: a pool of processes would
        # fail on the way back.
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
    # A network file system whose server, or a disk whose cable, is gone.
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
    """The same as a StorageError: its kind by its number."""
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
def telling(operation: str, url: str) -> Iterator[None]:
    """Whatever OSError happens inside is raised as a StorageError of `operation` on `url`."""
    try:
        yield
    except OSError as error:
        raise from_os_error(operation, url, error) from error
