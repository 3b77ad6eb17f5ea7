"""Straggler detection from the time of each rank's own work: data loading, computation, update. Pure.

In a synchronous step all ranks wait for the slowest, so step times are equal; only own work, without communication,
distinguishes ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from seatrial.job.layout import Layout

STEPS = 10  # steps in a window
WINDOWS = 3  # windows in a row that must agree
_DROPPED = 2  # largest values of a window, ignored: a page read from disk, a step on a busy core
_LEAST_SHARE = 0.003  # of the step: a smaller delay in the measured work does not matter


@dataclass(frozen=True)
class Straggler:
    """The own work of `rank` takes `seconds` per step; the median of its peers is `peers`."""

    rank: int
    seconds: float
    peers: float

    @property
    def factor(self) -> float:
        return self.seconds / self.peers

    @property
    def message(self) -> str:
        return f"rank {self.rank} takes {self.factor:.1f} times as long as its peers for its own work (data, computation)"

    @property
    def data(self) -> dict[str, Any]:
        """Machine-readable values."""
        return {"rank": self.rank, "seconds": self.seconds, "peers": self.peers, "factor": self.factor}


class StragglerWatch:
    """Evaluates window after window. Peers are the ranks of the same pipeline stage: they do the same work."""

    def __init__(self, layout: Layout, factor: float) -> None:
        """A straggler takes more than `factor` times as long as its peers in `WINDOWS` consecutive windows."""
        self._factor = factor
        stage_of = [layout.coordinates(r).pipeline for r in range(layout.world_size)]
        self._peers = [
            [p for p, stage in enumerate(stage_of) if stage == own and p != rank]
            for rank, own in enumerate(stage_of)
        ]
        self._window: list[tuple[float, ...]] = []
        self._step_seconds: list[float] = []
        self._row = [0] * layout.world_size  # consecutive windows that contradict `_known`
        self._known: set[int] = set()

    def add(self, local_seconds: Sequence[float], step_seconds: float) -> list[Straggler]:
        """Add one step of all ranks; returns newly found stragglers, each once until it has recovered."""
        self._window.append(tuple(local_seconds))
        self._step_seconds.append(step_seconds)
        if len(self._window) < STEPS:
            return []
        usual = [fmean(sorted(of_rank)[:-_DROPPED]) for of_rank in zip(*self._window, strict=True)]
        whole = median(self._step_seconds)
        self._window.clear()
        self._step_seconds.clear()
        found = []
        for rank, seconds in enumerate(usual):
            if not self._peers[rank]:
                continue
            peers = median(usual[p] for p in self._peers[rank])
            slow = peers > 0 and seconds > self._factor * peers and seconds - peers > _LEAST_SHARE * whole
            self._row[rank] = self._row[rank] + 1 if slow != (rank in self._known) else 0
            if self._row[rank] < WINDOWS:
                continue
            self._row[rank] = 0
            if slow:
                self._known.add(rank)
                found.append(Straggler(rank, seconds, peers))
            else:
                self._known.remove(rank)
        return found
