"""control/trackers/NAME.json: how much of a run was pushed to a tracker, so that a restart continues from there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.errors import InputError
from seatrial.base.files import read_json
from seatrial.record.folder import RunFolder
from seatrial.record.typed import decode


@dataclass
class Progress:
    """How much was pushed."""

    id: str | None = None  # the tracker's ID of the run; None: nothing was pushed yet
    step: int = 0  # the last one
    metrics_bytes: int = 0  # of metrics.jsonl
    events: int = 0  # lines of events.jsonl, including those that are not pushed
    counts: dict[str, int] = field(default_factory=dict)  # events pushed, by kind
    ended: bool = False  # the tracker has the end status of the run
    time: float = 0.0  # when this was written, every few seconds: a heartbeat


def path_of(folder: RunFolder, name: str) -> Path:
    return folder.trackers / f"{name}.json"


def read_progress(folder: RunFolder, name: str) -> Progress:
    """Raises InputError if the file is damaged: starting over would push everything twice."""
    path = path_of(folder, name)
    try:
        return decode(Progress, read_json(path))
    except FileNotFoundError:
        return Progress()
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"cannot read {path} ({error}), so it is unknown what was already pushed to {name}",
            hint="remove it to push everything again, as a new run in the tracker",
        ) from error


def write_progress(folder: RunFolder, name: str, progress: Progress) -> None:
    """Replace the file. Raises OSError."""
    atomic.write_text(path_of(folder, name), atomic.json_text(asdict(progress)), durable=False)
