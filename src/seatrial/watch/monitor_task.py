"""The interface of the tasks in the monitor's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from seatrial.record import messages as msg

Send = Callable[[msg.FromMonitor], None]  # sends the coordinator what to record; thread-safe


class MonitorTask(Protocol):
    """A task that follows a live run. An exception ends the monitor, which is restarted a few times."""

    def poll(self, now: float) -> None:
        """Called every second with unix time; must return within a second."""

    def close(self, until: float) -> None:
        """The run is over: finish by `until` (time.monotonic)."""
