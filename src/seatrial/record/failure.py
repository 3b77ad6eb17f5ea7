"""What failed: the exception of one rank, and the failure that ended the run.

A rank writes its `RankError`; the coordinator selects the first failure among all ends of processes, and from then on it
is a `Failure` everywhere: in messages, control/outcome.json, events.jsonl, and what a user is shown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seatrial.base.errors import EXIT_FAILED
from seatrial.base.files import read_json
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.typed import decode

_LITTLE_SPACE = 1 << 20  # bytes
_IN_EVENT = ("node", "rank", "cause", "time", "log", "hint", "tail")


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank, as in its error file. No `Failure`: the run may survive it, or another caused it."""

    time: float  # unix seconds
    rank: int
    node: int
    type: str  # of the exception
    message: str
    traceback: str | None  # None: a SeatrialError, whose message says it all
    consequence: bool  # of another process's exit or failure
    exit_code: int
    hint: str | None


@dataclass(frozen=True)
class Failure:
    """The failure that ended a start of a run, with its evidence."""

    node: int | None  # None: of no single node
    rank: int | None  # None: the node's agent or fork server, or of no single rank
    message: str  # one line, who and what: "rank 3 on node 0 was killed by SIGKILL"
    cause: str  # without the who: "was killed by SIGKILL", "ValueError: ..."
    time: float  # unix seconds: when it happened, or else was noticed
    exit_code: int = EXIT_FAILED  # or 2, bad input; events do not record it
    log: str = ""  # path; "": unknown, as below
    tail: str = ""  # the traceback, or else the log's last lines
    hint: str = ""

    def event_data(self) -> dict[str, Any]:
        """The data of the event that records it; the event has the message itself."""
        return {key: vars(self)[key] for key in _IN_EVENT}

    @classmethod
    def from_event(cls, event: Event) -> Failure:
        """The opposite of `event_data`; also from the event of a failed part of a run whose end was not recorded."""
        known: dict[str, Any] = {"node": event.node, "rank": event.rank, "time": event.time}
        known |= {"message": event.message, "cause": event.message}
        # The node and rank in `data` are those that failed; the event's own may be the writer's.
        data = {k: v for k, v in (event.data or {}).items() if k in _IN_EVENT and v not in (None, "")}
        try:
            return decode(cls, known | data)
        except ValueError:  # damaged
            return decode(cls, known)

    def completed(self, folder: RunFolder, generation: int) -> Failure:
        """A copy with the rank's whole traceback, and with its log and hint where they are missing here."""
        if self.node is None or self.rank is None:
            return self
        log = Path(self.log) if self.log else folder.rank_log(generation, self.node, self.rank)
        error = read_rank_error(log.with_suffix(".error.json"))
        return replace(
            self,
            log=self.log or (str(log) if log.exists() else ""),
            tail=(error and error.traceback) or self.tail,
            hint=self.hint or (error and error.hint) or "",
        )


def read_rank_error(path: Path) -> RankError | None:
    """The error file of a failed rank; None if there is none, or it is incomplete."""
    try:
        values = read_json(path)
        return decode(RankError, values) if isinstance(values, dict) else None
    except (OSError, ValueError):
        return None


def disk_hint(folder: RunFolder) -> str | None:
    """Hint if the run folder is unreachable or its disk full, which may be why no reason was written."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return f"{folder.path} cannot be reached: was it moved, or unmounted?"
    if disk.f_bavail * disk.f_frsize < _LITTLE_SPACE:
        return f"the disk of {folder.path} is full: make room, then run the same command again"
    return None
