"""Failure counters: the budgets that keep a run from failing and restarting forever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Counts:
    """Counts of recoveries, of signals by node, and of equal failures since the run last made progress."""

    def __init__(self) -> None:
        self.restarts = 0
        self.best = -1  # the furthest step that any generation completed
        self._seen: dict[tuple[str, int], int] = {}
        self._last: dict[
            tuple[str, int], float
        ] = {}  # not part of the memory: clocks differ between coordinators
        self._same: dict[tuple[str, str], tuple[int, int]] = {}  # -> furthest step at that time, count

    def seen(self, signal: str, node: int, now: float, burst_s: float) -> int:
        """Count this signal of this node and return the total. A burst, such as one Xid for each link, counts once."""
        key = (signal, node)
        if now - self._last.get(key, float("-inf")) >= burst_s:
            self._seen[key] = self._seen.get(key, 0) + 1
        self._last[key] = now
        return self._seen.get(key, 1)

    def same(self, signal: str, where: str, step: int) -> int:
        """Count a failure with this signal at `where`; return how many there were since the furthest step last rose."""
        furthest = max(step, self.best)
        before, times = self._same.get((signal, where), (-1, 0))
        times = times + 1 if furthest <= before else 1
        self._same[signal, where] = (furthest, times)
        return times

    def to_memory(self) -> dict[str, Any]:
        return {
            "restarts": self.restarts,
            "best": self.best,
            "seen": [[*key, times] for key, times in self._seen.items()],
            "same": [[*key, *value] for key, value in self._same.items()],
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, Any]) -> Counts:
        """The inverse of `to_memory`."""
        counts = cls()
        counts.restarts, counts.best = memory["restarts"], memory["best"]
        counts._seen = {(signal, node): times for signal, node, times in memory["seen"]}
        counts._same = {(signal, where): (step, times) for signal, where, step, times in memory["same"]}
        return counts
