"""The checkpoints of a run according to its folder, without querying other places."""

from __future__ import annotations

import os
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

    Other places are not queried: from those only the newest checkpoint recorded in the events is listed.
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
        except OSError:  # incomplete, or removed meanwhile
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
    """The newest checkpoint saved outside the run folder and not quarantined since."""
    saved: dict[int, CheckpointInfo] = {}
    name = folder.checkpoints.name
    for event in events:
        step, where = (event.data or {}).get("step"), (event.data or {}).get("folder")
        if not isinstance(step, int):
            continue
        if event.kind == "checkpoint_set_aside":
            saved.pop(step, None)
        elif event.kind == "checkpoint_saved" and isinstance(where, str):
            saved.pop(step, None)
            # Compare the name only: the run folder may have been copied or moved since.
            if "://" in where or os.path.basename(os.path.dirname(os.path.normpath(where))) != name:
                saved[step] = CheckpointInfo(step, where, event.time)
    return saved[max(saved)] if saved else None
