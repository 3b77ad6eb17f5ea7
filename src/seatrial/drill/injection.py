"""The log of injected faults: what, when and where. The run's records are judged against it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.record.jsonl import append_line


@dataclass(frozen=True)
class Injection:
    """One fault. `node` and `rank` are what a detection must name; None if there is none to name."""

    time: float  # unix seconds
    kind: str
    message: str
    step: int  # the last recorded step, or the one that the rank was in
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] | None = field(default=None)


def record_injection(path: Path, injection: Injection) -> None:
    """Append to the log."""
    append_line(path, vars(injection))


@dataclass(frozen=True)
class Planted:
    """A fault that a rank injects into itself (drill/worker.py): in `step`, once, however often ranks are restarted."""

    kind: str
    rank: int
    step: int
    message: str
    marker: str = ""  # path of the file that records when it fired; an Injection as JSON

    @classmethod
    def stop(cls, step: int, log: Path) -> Planted:
        """No fault: all ranks end after `step`, as after the last one; it leaves no marker. `log`: of the run."""
        return cls("stop", -1, step, "", str(log.with_suffix(".stopped")))

    def fired(self) -> Injection | None:
        """The injection, if the fault has fired; else None."""
        try:
            return Injection(**json.loads(Path(self.marker).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):  # a rank that is killed while it writes has not fired it yet
            return None
