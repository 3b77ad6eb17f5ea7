"""Whether a run is running, according to its folder: its lock is held, or a scheduled start's agents are alive."""

from __future__ import annotations

import time
from dataclasses import dataclass

from seatrial.record import lock
from seatrial.record.alive import last_beat
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, read_launch, read_outcome

# A heartbeat may become visible this late on a network file system, and clocks differ by seconds.
_STALE_S = 90.0


@dataclass(frozen=True)
class Running:
    """The process or scheduled start that runs a run."""

    pid: int | None = None  # of the process that holds the lock, if it can be read
    launch: Launch | None = None  # of a scheduled start that has not ended

    @property
    def who(self) -> str:
        if self.launch is not None:
            return f"{self.launch.launcher} {self.launch.handle or ''}".strip()
        return "a process" if self.pid is None else f"process {self.pid}"


def running(folder: RunFolder) -> Running | None:
    """The process or scheduled start that runs the run; None if it is not running. A scheduled start counts before its first agent."""
    if lock.is_held(folder.lock):
        return Running(pid=lock.holder(folder.lock))
    try:
        launch = read_launch(folder)
        if launch is None or not launch.scheduled or read_outcome(folder, launch.generation) is not None:
            return None
        beat = last_beat(folder)
    except (OSError, ValueError):
        return None
    if beat is not None and beat.time > launch.time and time.time() - beat.time > _STALE_S:
        return None  # agents had begun, but there is no coordinator any more
    return Running(launch=launch)
