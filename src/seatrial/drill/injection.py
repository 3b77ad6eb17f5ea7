"""What was done to a run, when and to whom: the log that its records are judged against."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.record.jsonl import append_line, read_numbered
from seatrial.record.typed import decode_all


@dataclass(frozen=True)
class Injection:
    """One fault. `node` and `rank` are what a detection must name; None where there is nobody to name."""

    time: float  # unix seconds
    kind: str
    message: str
    step: int  # the last one that was recorded, or that the rank was in
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] | None = field(default=None)


def record_injection(path: Path, injection: Injection) -> None:
    """Append to the log."""
    append_line(path, vars(injection))


def read_injections(path: Path) -> list[Injection]:
    """All of a log, by time. ValueError for a damaged one: nothing could be judged by it."""
    numbered, problems = read_numbered(path, "an injection")
    found, wrong = decode_all(Injection, numbered, file=path.name, noun="an injection")
    if problems or wrong:
        raise ValueError("; ".join(str(p) for p in problems + wrong))
    return sorted(found, key=lambda i: i.time)


@dataclass(frozen=True)
class Planted:
    """A fault that a rank does to itself (drill/worker.py): in `step`, once, whatever restarts follow."""

    kind: str
    rank: int
    step: int
    message: str
    marker: str = ""  # path of the file that says when it fired; an Injection as JSON

    def fired(self) -> Injection | None:
        """When it did, None if it has not."""
        try:
            return Injection(**json.loads(Path(self.marker).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):  # a rank that is killed while it writes has not done it yet
            return None
