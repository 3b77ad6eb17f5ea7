"""The runs that the server shows: those given, or all in a folder, looked up by name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.record.exposition import Labelled, exposition
from seatrial.record.folder import RunFolder
from seatrial.record.listing import read_listed, run_folders
from seatrial.record.run_series import run_values
from seatrial.watch.web.polled_run import PolledRun
from seatrial.watch.web.watched import Watched

_LIST_S = 3.0  # between two scans of all runs
_FEW = 4
# Telemetry samples older than so many intervals are stale; slack for this process reading late.
_OLD, _SLOW_S = 3, 10.0


class Runs:
    """Looks runs up, and starts reading one on its first request. Thread-safe except for `end`."""

    def __init__(self, chosen: Sequence[RunFolder], root: Path, loop: asyncio.AbstractEventLoop) -> None:
        """`chosen`: only these; empty: all in `root`."""
        self._root, self._loop = root, loop
        self._chosen = _named(chosen)
        self._watched: dict[str, Watched] = {}
        self._lock = threading.Lock()
        self._listed: tuple[float, dict[str, Any]] | None = None

    def begin(self) -> None:
        """Start reading the given runs, if they are few, so that the first browser need not wait."""
        for name in list(self._chosen)[:_FEW]:
            self.get(name)

    def get(self, name: str) -> Watched | None:
        """The run with this name; starts reading it."""
        with self._lock:
            found = self._watched.get(name)
            if found is None:
                folder = self._folders().get(name)
                if folder is None:
                    return None
                found = self._watched[name] = Watched(name, folder, self._loop)
        found.want()
        return found

    def listed(self) -> dict[str, Any]:
        """All runs with state, step, loss and age, newest first."""
        with self._lock:
            if self._listed is None or time.monotonic() >= self._listed[0]:
                started_at = time.monotonic()
                rows = [asdict(read_listed(folder.path, name)) for name, folder in self._folders().items()]
                rows.sort(key=lambda row: (row["state"] != "running", -(row["time"] or 0.0), row["name"]))
                one = next(iter(self._chosen)) if len(self._chosen) == 1 else None
                document = {"runs": rows, "one": one, "folder": None if self._chosen else str(self._root)}
                duration_s = time.monotonic() - started_at
                self._listed = (time.monotonic() + max(_LIST_S, 10 * duration_s), document)
            return self._listed[1]

    def metrics(self) -> bytes:
        """Prometheus series of the given, or else the running, runs; of a single run also those of its nodes."""
        names = list(self._chosen) or [
            run["name"] for run in self.listed()["runs"] if run["state"] == "running"
        ]
        found = [watched for name in names if (watched := self.get(name)) is not None]
        parts: list[Labelled] = []
        for watched in found:
            parts += watched.use(partial(_series, alone=len(found) == 1)) or []
        return exposition(parts)

    def end(self) -> None:
        """Stop reading, and end all streams. Called in the event loop's thread."""
        for watched in self._watched.values():
            watched.end()

    def _folders(self) -> dict[str, RunFolder]:
        if self._chosen:
            return self._chosen
        try:
            return _named([RunFolder(path) for path in sorted(run_folders(self._root, False))])
        except OSError:  # folder removed, or storage not reachable
            return {}


def _series(polled: PolledRun, alone: bool) -> list[Labelled]:
    """The series of one run. `alone`: with device series, which have no run label and so would mix if there were several."""
    now = time.time()
    fresh = [
        (node, sample)
        for node, sample in polled.telemetry.items()
        if alone and now - sample.time < _OLD * sample.every_s + _SLOW_S
    ]
    values = run_values(polled.view, now)
    return [({}, values), *(({"node": str(node)}, sample.values) for node, sample in fresh)]


def _named(folders: Sequence[RunFolder]) -> dict[str, RunFolder]:
    found: dict[str, RunFolder] = {}
    for folder in folders:
        name = base = folder.path.absolute().name
        number = 2
        while name in found:
            name, number = f"{base} ({number})", number + 1
        found[name] = folder
    return found
