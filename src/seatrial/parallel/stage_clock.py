"""The clock that divides a rank's time among the stages of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from seatrial.hardware import accelerator
from seatrial.record.stages import HOST, STAGES

Lap = tuple[int, list[float]]  # a step, and the seconds of each of STAGES


class StageClock:
    """Time always counts for exactly one stage, so the stages of a step add up to its time.

    On a CPU that is the wall clock of this process. On a GPU it is the time of the compute stream between events
    recorded where the stage changes: it includes the stream's waits, and needs no host synchronisation. A lap is then
    known a step or two later.

    It does nothing before `start` and after `stop`.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_accelerator = accelerator.is_accelerator(device)
        self.stage = HOST
        self._running = False
        self._only = False  # no other stage can be entered
        self._since = 0
        self._ns = [0] * len(STAGES)
        self._laps: list[Lap] = []
        # On a GPU: the end of a part, the stage that it counts for, and the step that it completes.
        self._marks: deque[tuple[torch.Event, int, int | None]] = deque()
        self._last: torch.Event | None = None
        self._spare: list[torch.Event] = []
        self._seconds = [0.0] * len(STAGES)

    def start(self) -> None:
        """Begin the first lap."""
        self.stage, self._running = HOST, True
        if self.on_accelerator:
            self._last = self._recorded()
        self._since = time.perf_counter_ns()

    def stop(self) -> None:
        """Count no more time; laps that are complete can still be read."""
        self._running = False

    def enter(self, stage: int) -> int:
        """From now on time counts for `stage`; returns the one that it counted for."""
        before = self.stage
        if stage == before or self._only or not self._running:
            return before
        self._end(before)
        self.stage = stage
        return before

    @contextmanager
    def during(self, stage: int) -> Iterator[None]:
        """Time counts for `stage` inside, as far as it enters no other."""
        before = self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def only(self, stage: int) -> Iterator[None]:
        """All time inside counts for `stage`, also where it enters another."""
        before = self.enter(stage)
        self._only = True
        try:
            yield
        finally:
            self._only = False
            self.enter(before)

    def lap(self, step: int) -> None:
        """End the lap of `step`; the next begins, in the same stage."""
        if not self._running:
            return
        self._end(self.stage, step)
        if not self.on_accelerator:
            self._laps.append((step, [ns / 1e9 for ns in self._ns]))
            self._ns = [0] * len(STAGES)

    def laps(self) -> list[Lap]:
        """The laps completed since the last call; on a GPU those that the device has completed."""
        if self.on_accelerator:
            self._read_marks()
        laps, self._laps = self._laps, []
        return laps

    def _end(self, stage: int, step: int | None = None) -> None:
        if self.on_accelerator:
            self._marks.append((self._recorded(), stage, step))
            return
        now = time.perf_counter_ns()
        self._ns[stage] += now - self._since
        self._since = now

    def _read_marks(self) -> None:
        while self._marks and self._marks[0][0].query():
            event, stage, step = self._marks.popleft()
            assert self._last is not None
            self._seconds[stage] += max(0.0, self._last.elapsed_time(event)) / 1000
            self._spare.append(self._last)
            self._last = event
            if step is not None:
                self._laps.append((step, self._seconds))
                self._seconds = [0.0] * len(STAGES)

    def _recorded(self) -> torch.Event:
        if not self._spare:
            return accelerator.record(timing=True)
        event = self._spare.pop()
        event.record()
        return event
