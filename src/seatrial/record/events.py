"""events.jsonl: the events of the run, appended by one process at a time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from seatrial.base.files import open_file
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem, append_line, read_numbered
from seatrial.record.typed import decode_all

NOUN = "an event"

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Event:
    """One event. `node` and `rank` are None if it concerns the whole run."""

    time: float  # unix seconds
    generation: int
    kind: str
    severity: str
    message: str
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] | None = field(default=None)


def sync(folder: RunFolder) -> None:
    """Fsync what was appended on this host so far. Raises OSError; a no-op if there are no events."""
    try:
        fd = open_file(folder.events)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append(
    folder: RunFolder,
    kind: str,
    message: str,
    *,
    severity: Severity = "info",
    generation: int,
    node: int | None = None,
    rank: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Append one event, dated now. While agents run, only the coordinator may. Raises OSError if the write fails."""
    write(folder, Event(time.time(), generation, kind, severity, message, node, rank, data))


def write(folder: RunFolder, event: Event) -> None:
    """Append `event` as it is. Raises OSError if the write fails."""
    append_line(folder.events, vars(event))


def read_events(folder: RunFolder) -> tuple[list[Event], list[Problem]]:
    """All events in file order, and problems of invalid lines."""
    numbered, problems = read_numbered(folder.events, NOUN)
    events, wrong = decode_all(Event, numbered, file=folder.events.name, noun=NOUN)
    return events, sorted(problems + wrong, key=lambda p: p.line)
