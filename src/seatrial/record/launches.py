"""The current start of a run, and its outcome: control/launch.json and control/outcome.json.

A start is one attempt to run: it has its own first generation and secret. Each file is replaced atomically by one
writer at a time, so that a reader on another host sees the old content or the new one.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from seatrial.base import atomic
from seatrial.base.complain import complain
from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, InputError
from seatrial.base.files import parse_json, read_bytes, read_text
from seatrial.record import events
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.typed import decode

if TYPE_CHECKING:
    from seatrial.job.layout import Layout

SCHEMA_VERSION = 1
Record = TypeVar("Record")


@dataclass(frozen=True)
class Launch:
    """The current start, as recorded by the process that began it."""

    launcher: str
    generation: int  # its first one
    time: float  # unix seconds
    host: str  # of the process that wrote it
    scheduled: bool  # a scheduler runs it, and no process holds the run's lock
    handle: str | None = None  # the scheduler's job identifier; None: not submitted yet, or no scheduler
    # The first generation of the start that the user submitted; this start is it, or a follow-up of it.
    submitted: int | None = None


@dataclass(frozen=True)
class StartOutcome:
    """The outcome of a start."""

    generation: int  # the first one of that start
    term: int
    exit_code: int
    message: str
    failure: Failure | None
    time: float


def write_launch(folder: RunFolder, launch: Launch) -> None:
    """Replace control/launch.json. Raises OSError."""
    atomic.write_bytes(folder.launch_json, encoded(launch))


def read_launch(folder: RunFolder) -> Launch | None:
    """The current start; None if no version that writes the record ever started the run. Raises OSError, ValueError."""
    return _read(Launch, folder.launch_json)


def checked_launch(folder: RunFolder) -> Launch | None:
    """As `read_launch`. Raises InputError if the record cannot be used."""
    try:
        return read_launch(folder)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder.launch_json} cannot be used, so it is unknown which process runs the run: {error}",
            hint="if you are sure that none does, remove the file and start the run again",
        ) from error


def known_launch(folder: RunFolder) -> Launch | None:
    """The current start; also None if it cannot be read: for views, which report damaged records elsewhere."""
    try:
        return read_launch(folder)
    except (OSError, ValueError):
        return None


def record_handle(folder: RunFolder, launch: Launch, handle: str) -> Launch:
    """Add the scheduler's handle to the record of `launch`."""
    known = replace(launch, handle=handle)
    write_launch(folder, known)
    return known


def read_outcome(folder: RunFolder, generation: int) -> StartOutcome | None:
    """The outcome of the start whose first generation is `generation`; None if it has not ended or cannot be read."""
    try:
        found = _read(StartOutcome, folder.outcome_json)
    except (OSError, ValueError) as error:
        complain(f"{folder.outcome_json} is not used: {error}")
        return None
    return found if found is not None and found.generation == generation else None


def record_end(folder: RunFolder, launch: Launch, exit_code: int, message: str) -> None:
    """Record the end of a scheduled start that has no agents, and so no coordinator to record it. Raises OSError."""
    end = {**end_event(exit_code, None, 0), "message": message}
    events.append(folder, generation=launch.generation, **end)
    outcome = StartOutcome(launch.generation, 0, exit_code, message, None, time.time())
    atomic.write_bytes(folder.outcome_json, encoded(outcome))


def begin_event(layout: Layout, scheduled: Literal["submitted", "continued"] | None = None) -> dict[str, Any]:
    """The event that records a start: kind, message, data.

    `scheduled`: a scheduler gets it now ("submitted"), or has just begun the job that continues the run ("continued").
    """
    message = f"{layout.world_size} ranks: {layout}"
    data = {"layout": layout.as_dict()} | ({} if scheduled is None else {"scheduled": scheduled})
    return {"kind": "run_started", "message": message, "data": data}


def follow_up(folder: RunFolder) -> str | None:
    """The job that waits to continue the run after the current one; None if there is none."""
    try:
        return read_text(folder.follow_up).strip() or None
    except (OSError, ValueError):
        return None


def end_event(exit_code: int, failure: Failure | None, steps: int) -> dict[str, Any]:
    """The event that records a start's end: kind, message and, if they apply, severity, node, rank, data."""
    if failure is not None:
        return {
            "kind": "run_failed",
            "message": failure.message,
            "severity": "error",
            "node": failure.node,
            "rank": failure.rank,
            "data": failure.event_data(),
        }
    if exit_code == EXIT_DONE:
        return {"kind": "run_finished", "message": f"all {steps} steps are done"}
    if exit_code in (EXIT_FAILED, EXIT_BAD_INPUT):
        message = "it ended without a recorded failure"
        return {"kind": "run_failed", "message": message, "severity": "error", "data": {}}
    preempted = exit_code == EXIT_PREEMPTED
    return {
        "kind": "run_interrupted",
        "message": "preempted: the same command resumes from the last saved state"
        if preempted
        else "interrupted; the same command resumes",
        "severity": "warning",
        "data": {"preempted": preempted},
    }


def encoded(record: Launch | StartOutcome) -> bytes:
    """The content of the record's file."""
    return atomic.json_text({"schema_version": SCHEMA_VERSION, **asdict(record)}).encode()


def _read(cls: type[Record], path: Any) -> Record | None:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return None
    if not data:
        return None  # created empty, see `filesystem.put_token`
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    version = value.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema version {version}, not {SCHEMA_VERSION}")
    return decode(cls, value)
