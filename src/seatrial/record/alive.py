"""The coordinator and its last heartbeat: `control/lease.json`, for readers on any host.

The coordinator replaces the file every few seconds while it holds the lease. `time` is from its own clock: a reader on
another host may report a heartbeat's age, but must not decide by it. `control/net/lease.py` decides leadership.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from seatrial.base.files import NotAFile, parse_json, read_bytes
from seatrial.record.folder import RunFolder
from seatrial.record.typed import decode

_LONGEST = 1 << 16  # bytes


@dataclass(frozen=True)
class Beat:
    """One term, its holder and its address; `count` and `time` (unix seconds) are of its last heartbeat."""

    term: int
    node: int
    address: str
    port: int
    time: float
    count: int = 0  # 0: the claim of the lease


def last_beat(folder: RunFolder) -> Beat | None:
    """The coordinator's last heartbeat; None if there is none, or the file is damaged.

    Raises OSError if the file system cannot read it.
    """
    with contextlib.suppress(FileNotFoundError, NotAFile):
        return parse_beat(read_bytes(folder.lease_json, most=_LONGEST))
    return None


def parse_beat(data: bytes) -> Beat | None:
    """Parse the content of `control/lease.json` or of a claim; None if it is damaged."""
    try:
        beat = decode(Beat, parse_json(data))
    except (ValueError, TypeError):
        return None
    return beat if beat.term > 0 and 0 <= beat.port < 1 << 16 else None
