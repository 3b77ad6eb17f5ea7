"""What the monitor's process runs: things that follow a live run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from seatrial.record import messages as msg

Tell = Callable[[msg.FromMonitor], None]  # has the coordinator record it; any thread may call it


class Follows(Protocol):
    """Something that follows a live run. An exception of it ends the monitor, which is started again a few times."""

    def poll(self, now: float) -> None:
        """Called every second with unix time; must not block for longer."""

    def close(self, until: float) -> None:
        """The run is over. It may take until `until`, on the clock of `time.monotonic`."""
