"""Check before the start what a run on several hosts needs of its run folder's file system.

`check_filesystem` and `put_token` are for the process that starts the run, `check_token` for each node.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from seatrial.base.atomic import write_text
from seatrial.base.errors import HINTS, Diagnostic, InputError
from seatrial.base.files import read_text
from seatrial.base.units import memory
from seatrial.record.folder import RunFolder

_ELSEWHERE = (
    "put the run folder on a file system that does (NFS, Lustre, GPFS, ...); mounts of object stores do not"
)
_SHARED = "every node must have the run folder mounted, writable, at the same path"
_AGAIN_S = 0.2
_RENAMES = 5


def check_filesystem(path: Path, least_bytes: int) -> float:
    """Time of the slowest of some renames in the folder `path`, in seconds; leaves nothing behind.

    Raises InputError for everything its file system does not support, or if it has less free space than `least_bytes`.
    """
    problems = []
    try:
        free = shutil.disk_usage(path).free
        trial = Path(tempfile.mkdtemp(prefix=".seatrial-check-", dir=path))
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "give an existing folder that you may write to")
        raise InputError(f"{path} cannot be written: {error.strerror}", hint=hint) from None
    if free < least_bytes:
        message = f"{path} has {memory(free)} free, but the run needs {memory(least_bytes)}"
        problems.append(Diagnostic(message, hint=HINTS[errno.ENOSPC]))
    try:
        for what, works in _NEEDED.items():
            why, hint = None, _ELSEWHERE
            try:
                (place := trial / works.__name__).mkdir()
                why = None if works(place) else "it behaves differently"
            except OSError as error:
                why, hint = error.strerror, HINTS.get(error.errno or 0, _ELSEWHERE)
            if why is not None:
                problems.append(Diagnostic(f"the file system of {path} does not {what}: {why}", hint=hint))
        slowest_s = 0.0 if problems else max(_rename_s(trial / "renamed") for _ in range(_RENAMES))
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    if problems:
        raise InputError(problems)
    return slowest_s


def _rename_s(file: Path) -> float:
    file.touch()
    started_at = time.monotonic()
    file.rename(file.with_suffix(".new"))
    return time.monotonic() - started_at


def _refuses(operation: Callable[[], object], *codes: int) -> bool:
    try:
        operation()
    except OSError as error:
        return error.errno in codes
    return False


def _replaces(place: Path) -> bool:
    for text in ("old", "new"):
        write_text(place / "file", text)
    return (place / "file").read_text() == "new"


def _creates_once(place: Path) -> bool:
    (place / "file").touch(exist_ok=False)
    return _refuses(lambda: (place / "file").touch(exist_ok=False), errno.EEXIST)


def _links_once(place: Path) -> bool:
    (place / "file").touch()
    os.link(place / "file", place / "taken")
    return _refuses(lambda: os.link(place / "file", place / "taken"), errno.EEXIST)


def _keeps_full_folders(place: Path) -> bool:
    (place / "folder" / "inner").mkdir(parents=True)
    return _refuses((place / "folder").rmdir, errno.ENOTEMPTY, errno.EEXIST)


def _appends(place: Path) -> bool:
    for line in ("one", "two"):
        with open(place / "file", "a", encoding="ascii") as file:
            file.write(line)
    return (place / "file").read_text() == "onetwo"


_NEEDED: dict[str, Callable[[Path], bool]] = {
    "replace a file by another, durably (fsync, rename)": _replaces,
    "create a file only where there is none (O_EXCL)": _creates_once,
    "link a file to a name that is free, and to no other (link)": _links_once,
    "keep a folder that is not empty (rmdir)": _keeps_full_folders,
    "append to a file (O_APPEND)": _appends,
}


def put_token(folder: RunFolder, generation: int) -> None:
    """Write the token that each node of the start with this first generation must see. Raises OSError."""
    for old in folder.control.glob("token-*"):
        with contextlib.suppress(OSError):
            old.unlink()
    # The generation is in the name: nothing has looked it up before, so no node has a negative cache entry for it.
    write_text(_token(folder, generation), f"{socket.gethostname()}\n")
    # Create these for the same reason, before anything looks them up. A node with a negative cache entry for the lease,
    # valid for a minute, that is then cut off from the network would see no heartbeat of the coordinator, and take over
    # from it; a process that follows the run would learn of its end a minute late.
    folder.lease_json.touch(mode=0o644)
    folder.outcome_json.touch(mode=0o644)


def check_token(folder: RunFolder, generation: int, *, wait_s: float = 0.0) -> None:
    """Raise InputError, naming this node, if it does not see what `put_token` wrote, or cannot write there.

    Retries for `wait_s`: this node's cache may not have the folders above yet.
    """
    until = time.monotonic() + wait_s
    token = _token(folder, generation)
    while True:
        try:
            read_text(token)
            with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder.control):
                return
        except OSError as error:
            if time.monotonic() >= until:
                what = f"does not see the run folder {folder.path}, or cannot write in it: {token.name}: {error.strerror}"
                raise InputError(f"node {socket.gethostname()} {what}", hint=_SHARED) from None
        time.sleep(_AGAIN_S)


def _token(folder: RunFolder, generation: int) -> Path:
    return folder.control / f"token-{generation:06d}"
