"""How a rank writes events to the run's events.jsonl: through its agent, or directly if it has none.

O_APPEND is not atomic across hosts on a network file system: while agents run, only the coordinator writes that file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from seatrial.record import events
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.train.supervision.supervisor_client import SupervisorClient


@dataclass(frozen=True)
class Records:
    """Records the events of one rank in one generation; `rank` None: its events concern the whole run.

    `settle()` returns once every earlier event is on disk. It and `put` may raise OSError.
    """

    generation: int
    rank: int | None
    put: Callable[[Event], object]
    settle: Callable[[], None]

    def event(
        self,
        kind: str,
        message: str,
        *,
        severity: events.Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Record an event, with the current time."""
        self.put(Event(time.time(), self.generation, kind, severity, message, None, self.rank, data))

    def event_of_first(
        self,
        kind: str,
        message: str,
        *,
        severity: events.Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Record an event that all ranks see; only rank 0 writes it."""
        if self.rank == 0:
            self.event(kind, message, severity=severity, data=data)


def into_file(folder: RunFolder, generation: int, rank: int | None) -> Records:
    """Records of an unsupervised rank, written directly to the file."""
    return Records(generation, rank, partial(events.write, folder), partial(events.sync, folder))


def through_agent(supervisor_client: SupervisorClient, generation: int, rank: int) -> Records:
    """Records of a rank with an agent, which forwards them to the coordinator."""
    return Records(generation, rank, supervisor_client.record, supervisor_client.settle)
