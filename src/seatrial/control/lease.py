"""Who coordinates: a number that only grows, taken by making a file that nobody else has made.

`control/leases/00000007.json` is term 7 and says whose it is. Making a link is atomic also on network file systems,
so a term has one holder. A holder that finds a newer term has lost its own; agents obey the newest term they know.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.files import NotAFile, read_json
from seatrial.record.typed import decode

_NAME = re.compile(r"([0-9]{8,})\.json")


@dataclass(frozen=True)
class Lease:
    """One term: its holder, and where the holder listens."""

    term: int
    node: int
    address: str
    port: int
    time: float  # unix seconds, of the claim


def claim(folder: Path, lease: Lease) -> bool:
    """Take the term of `lease`; False if somebody has it already. Raises OSError where the folder refuses."""
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone must not come back half
    draft = folder / f".claim-{socket.gethostname()}-{os.getpid()}-{lease.node}-{lease.term}"
    atomic.write_text(draft, json.dumps(asdict(lease)))
    try:
        os.link(draft, _path(folder, lease.term))
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return True


def newest(folder: Path) -> Lease | None:
    """The lease of the highest term; None where there was none. A damaged file counts as its number.

    Raises OSError where the file system does not give it: that says nothing about its holder.
    """
    term = last_term(folder)
    if term == 0:
        return None
    try:
        lease = decode(Lease, read_json(_path(folder, term)))
    except (ValueError, TypeError, NotAFile):
        lease = None
    if lease is None or lease.term != term or not 0 <= lease.port < 1 << 16:
        return Lease(term, -1, "", 0, time.time())
    return lease


def last_term(folder: Path) -> int:
    """The highest term ever taken; 0 for none."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return max((int(name[1]) for name in map(_NAME.fullmatch, names) if name), default=0)


def _path(folder: Path, term: int) -> Path:
    return folder / f"{term:08d}.json"


def renew(folder: Path, term: int) -> bool:
    """Say that the holder of `term` lives; False once there is a newer term, whose holder decides now."""
    with contextlib.suppress(OSError):
        os.utime(_path(folder, term), follow_symlinks=False)
    return last_term(folder) <= term  # a folder that cannot be read tells of none


def renewed(folder: Path, term: int) -> int:
    """When `term` was last renewed, on the file system's clock (nanoseconds; only whether it changes matters)."""
    try:
        return _path(folder, term).lstat().st_mtime_ns
    except OSError:
        return 0
