"""Detect processes that make no progress, by sampling their state in /proc.

A stopped process (SIGSTOP, job control) blocks everything that waits for it and reports nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SAMPLE_S = 1.0  # sampling interval
STOPPED_S = 5.0  # longer than a pause of the whole machine or a debugger's snapshot
IDLE_S = 30.0  # without CPU time, for a process with work to do; even on a slow file system it gets some now and then


@dataclass
class _Past:
    ticks: int
    stopped_s: float = 0.0
    idle_s: float = 0.0


def state_of(pid: int) -> tuple[str, int] | None:
    """State letter and CPU time in ticks of `pid` (proc(5)); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[11]) + int(fields[12])


class StalledProcesses:
    """Finds processes that make no progress. Call `find` every `SAMPLE_S`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], tuple[str, int] | None] = state_of,
    ) -> None:
        self._clock, self._state_of = clock, state_of
        self._past: dict[int, _Past] = {}
        self._sampled_at = clock()

    def find(self, pids: Mapping[int, bool]) -> dict[int, str]:
        """The stalled processes among `pids` (pid -> whether it always has work to do), each with a description."""
        now = self._clock()
        # If this process itself was paused, the whole machine may have been: do not count the gap.
        seconds, self._sampled_at = min(now - self._sampled_at, 2 * SAMPLE_S), now
        past, self._past, found = self._past, {}, {}
        for pid, works in pids.items():
            state = self._state_of(pid)
            if state is None:
                continue
            letter, ticks = state
            known = past.get(pid)
            if known is None or known.ticks != ticks:
                self._past[pid] = _Past(ticks)
                continue
            self._past[pid] = known
            known.idle_s += seconds
            known.stopped_s = known.stopped_s + seconds if letter == "T" else 0.0
            if known.stopped_s >= STOPPED_S:
                found[pid] = f"has been stopped by a signal for {known.stopped_s:.0f} s"
            elif works and known.idle_s >= IDLE_S:
                found[pid] = f"has used no CPU time for {known.idle_s:.0f} s"
        return found
