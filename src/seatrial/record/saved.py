"""The checkpoints of a run, as far as its folder tells without asking any other place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.base.files import read_text
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder

_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    where: str  # path or address
    time: float  # unix seconds when it was completed


def read_checkpoints(
    folder: RunFolder, events: Sequence[Event]
) -> tuple[list[CheckpointInfo], CheckpointInfo | None]:
    """The complete checkpoints (those with a manifest) by step, and the one that `latest` names, else the newest.

    Of those that lie elsewhere, nobody is asked what is there: of them it is the newest that the events tell of.
    """
    found = []
    try:
        paths = list(folder.checkpoints.iterdir())
    except OSError:
        paths = []
    for path in paths:
        match = _STEP_FOLDER.fullmatch(path.name)
        if match is None:
            continue
        try:
            found.append(CheckpointInfo(int(match[1]), str(path), (path / "manifest.json").stat().st_mtime))
        except OSError:  # half written, or removed while we look
            continue
    found.sort(key=lambda c: c.step)
    try:
        named = read_text(folder.checkpoints / "latest", links=True).strip()
    except (OSError, ValueError):
        named = ""
    latest = next((c for c in found if Path(c.where).name == named), found[-1] if found else None)
    elsewhere = _saved_elsewhere(folder, events)
    if elsewhere is not None and (latest is None or elsewhere.step > latest.step):
        found.append(elsewhere)
        latest = elsewhere
    return found, latest


def _saved_elsewhere(folder: RunFolder, events: Sequence[Event]) -> CheckpointInfo | None:
    """The newest checkpoint that was saved into another place than the run folder, and not set aside since."""
    saved: dict[int, CheckpointInfo] = {}
    for event in events:
        step, where = (event.data or {}).get("step"), (event.data or {}).get("folder")
        if not isinstance(step, int):
            continue
        if event.kind == "checkpoint_set_aside":
            saved.pop(step, None)
        elif event.kind == "checkpoint_saved" and isinstance(where, str):
            saved.pop(step, None)
            # By its name: the folder may be a copy, and lie in another place than when that was written.
            if "://" in where or Path(where).parent.name != folder.checkpoints.name:
                saved[step] = CheckpointInfo(step, where, event.time)
    return saved[max(saved)] if saved else None
