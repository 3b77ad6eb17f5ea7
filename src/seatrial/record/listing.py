"""The run folders below a folder, and what each shows of itself in a few milliseconds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from seatrial.base.errors import InputError
from seatrial.record.folder import RunFolder
from seatrial.record.launches import read_launch
from seatrial.record.view import RunView, read_brief

UNUSABLE = "unusable"  # in place of a state: the folder cannot be read as a run

_SPEED_STEPS = 20  # the speed is their median
_OLD = re.compile(r"\.old-\d+$")  # renamed by --fresh
# If a folder has any of these, it is or was a run.
_TRACES = ("control", "checkpoints", "logs")


@dataclass
class Listed:
    """One run of the list. None: unknown, or none yet."""

    name: str  # path below the listed folder
    state: str
    why: str = ""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    time: float | None = None  # unix seconds of the last record
    generation: int = 0
    launcher: str | None = None
    handle: str | None = None  # the launcher's, such as a job number
    host: str | None = None  # from which it was started
    problems: list[str] = field(default_factory=list)


def run_folders(root: Path, everything: bool) -> Iterator[Path]:
    """Folders with a run or traces of one, including unreadable ones."""
    places = [root]
    if everything:
        places += sorted((root / ".drill").glob("*/"))
    for place in places:
        for path in place.iterdir() if place.is_dir() else ():
            if path.name.startswith(".") or not path.is_dir() or (_OLD.search(path.name) and not everything):
                continue
            traces = (path / trace for trace in _TRACES)
            if not _readable(path) or RunFolder(path).is_run() or any(p.is_dir() for p in traces):
                yield path


def _readable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.X_OK)


def read_listed(path: Path, name: str) -> Listed:
    """Read the run at `path`, called `name`; one that cannot be read is `UNUSABLE`, with the reason."""
    if not _readable(path):
        return Listed(name, UNUSABLE, problems=["it cannot be read: permission denied"])
    try:
        folder = RunFolder.open(path)
    except InputError as error:
        return Listed(name, UNUSABLE, problems=[diagnostic.full_message for diagnostic in error.diagnostics])
    view = read_brief(folder)
    launch, problems = None, []
    try:
        launch = read_launch(folder)
    except (OSError, ValueError) as error:
        problems = [f"control/launch.json cannot be used ({error})"]
    times = [e.time for e in view.events[-1:]] + ([view.last.time] if view.last else [])
    return Listed(
        name,
        view.state,
        why=view.state_reason,
        step=view.step,
        steps=view.job.steps,
        loss=view.last.loss if view.last else None,
        tokens_per_s=_speed(view),
        time=max(times, default=None),
        generation=view.generation,
        launcher=launch.launcher if launch is not None else None,
        handle=launch.handle if launch is not None else None,
        host=launch.host if launch is not None else None,
        problems=[*(str(p) for p in view.problems), *problems],
    )


def _speed(view: RunView) -> float | None:
    since = view.history.generations[-1] if view.history.generations else 0
    recent = view.history.column("tokens_per_s", since)[-_SPEED_STEPS:]
    return median(recent) if recent else None
