"""The grace period for processes that were ordered to stop, counted in time in which they could have run.

A rank that was ordered to stop and has to wait for a CPU is late through no fault of its own, and killing it loses the
state that it holds. So time with more runnable processes than CPUs does not count, up to a limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from seatrial.control.machine.types import MOST_GRACES

SAMPLE_S = 0.05  # between two readings of the load


def crowded(loadavg: str = "/proc/loadavg") -> bool:
    """Whether more processes are runnable on this machine than it has CPUs; False if that is unknown."""
    try:
        with open(loadavg, encoding="ascii") as file:
            # "0.20 0.18 0.12 3/80 11206": runnable at this moment / all (man 5 proc_loadavg). We are one of them.
            running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return running > (os.cpu_count() or 1)


class Grace:
    """A grace period of `seconds`; not `extend`: by the clock alone. Call `over` at least at every `deadline`."""

    def __init__(
        self,
        seconds: float,
        *,
        extend: bool = True,
        clock: Callable[[], float] = time.monotonic,
        crowded: Callable[[], bool] = crowded,
    ) -> None:
        self._clock, self._crowded = clock, crowded
        self._sampled_at = clock()
        self._left = seconds
        self._end = self._sampled_at + (MOST_GRACES if extend else 1) * seconds

    def shorten(self, seconds: float, *, extend: bool = True) -> None:
        """Limit it to `seconds` from now on."""
        self._left = min(self._left, seconds)
        self._end = min(self._end, self._clock() + (MOST_GRACES if extend else 1) * seconds)

    @property
    def deadline(self) -> float:
        """When to call `over` again, on the clock."""
        return min(self._sampled_at + min(self._left, SAMPLE_S), self._end)

    def over(self) -> bool:
        """Whether it has passed."""
        now = self._clock()
        if now >= self._end:
            return True
        if now >= self._sampled_at + min(self._left, SAMPLE_S):
            # The current load stands for all the time since the last reading, of which at most two intervals count: if
            # it was longer, we had to wait for a CPU ourselves.
            if not self._crowded():
                self._left -= min(now - self._sampled_at, 2 * SAMPLE_S)
            self._sampled_at = now
        return self._left <= 0
