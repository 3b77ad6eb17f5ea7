"""How often what has failed: the budgets that keep a run from failing for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Counts:
    """Recoveries, signals by node, and equal failures since the run last got further."""

    def __init__(self) -> None:
        self.restarts = 0
        self.best = -1  # the furthest step that any generation completed
        self._seen: dict[tuple[str, int], int] = {}
        self._last: dict[
            tuple[str, int], float
        ] = {}  # not in the memory: another coordinator has another clock
        self._same: dict[tuple[str, str], tuple[int, int]] = {}  # -> furthest step at that time, how often

    def seen(self, signal: str, node: int, now: float, burst_s: float) -> int:
        """The how-many-eth time this signal came from this node. A burst, such as one Xid for each link, is one."""
        key = (signal, node)
        if now - self._last.get(key, float("-inf")) >= burst_s:
            self._seen[key] = self._seen.get(key, 0) + 1
        self._last[key] = now
        return self._seen.get(key, 1)

    def same(self, signal: str, where: str, step: int) -> int:
        """The how-many-eth failure with this signal there, without the run having got further than it ever had."""
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
