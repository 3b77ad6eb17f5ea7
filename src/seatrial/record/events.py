"""events.jsonl: what happened to the run, appended to by every part of it."""

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
    """One thing that happened. `node` and `rank` are None where it concerns the whole run."""

    time: float  # unix seconds
    generation: int
    kind: str
    severity: str
    message: str
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] | None = field(default=None)


def sync(folder: RunFolder) -> None:
    """Make durable what any process has appended so far. Raises OSError; where there are no events nothing happens."""
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
    """Append one event; any process may, at any time. Raises OSError where the file system refuses."""
    event = Event(time.time(), generation, kind, severity, message, node, rank, data)
    append_line(folder.events, vars(event))


def read_events(folder: RunFolder) -> tuple[list[Event], list[Problem]]:
    """Every event in the order of the file, and the lines that are none."""
    numbered, problems = read_numbered(folder.events, NOUN)
    events, wrong = decode_all(Event, numbered, file=folder.events.name, noun=NOUN)
    return events, sorted(problems + wrong, key=lambda p: p.line)
