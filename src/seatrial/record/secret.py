"""The shared secret of the processes of one start, which authenticates the connections between them.

It is in the run folder, readable only by its owner, and nowhere else: no command line, environment, event or log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path

from seatrial.base.atomic import fsync_folder
from seatrial.base.errors import InputError
from seatrial.base.files import open_file
from seatrial.record.folder import RunFolder

_BYTES = 32


def make_secret(folder: RunFolder) -> None:
    """Write a new secret; leftover processes of an earlier start can no longer take part. Raises OSError."""
    path = folder.secret
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    # Private to its owner from its creation, not only once it is complete.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as f:
            f.write(secrets.token_hex(_BYTES) + "\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def read_secret(folder: RunFolder) -> bytes:
    """The secret of this start. Raises InputError if it is missing or unusable."""
    try:
        secret = bytes.fromhex(_owned(folder.secret))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder.secret} cannot be used: {getattr(error, 'strerror', None) or error}", hint=_HINT
        ) from error
    if len(secret) != _BYTES:
        raise InputError(f"{folder.secret} has {len(secret)} bytes, not {_BYTES}", hint=_HINT)
    return secret


def _owned(path: Path) -> str:
    """The text of a file that this user owns and no other user can access. Raises OSError."""
    with open(open_file(path), "rb") as file:
        owner = _whose(file.fileno())
        if owner != (os.geteuid(), 0):
            # Some file servers map all owners to another user, or show every mode as open: compare with a new file.
            with tempfile.TemporaryFile(dir=path.parent) as new:
                if owner != _whose(new.fileno()):
                    raise PermissionError(
                        errno.EPERM, "it belongs to another user, or other users can read it", str(path)
                    )
        return file.read(4 * _BYTES).decode("ascii")


def _whose(fd: int) -> tuple[int, int]:
    """(owner's uid, permission bits of group and others)."""
    status = os.fstat(fd)
    return status.st_uid, stat.S_IMODE(status.st_mode) & 0o077


_HINT = "start the run again: each start writes a new one"
