"""Reads a live run's folder for the rules: each look reads what was added since the one before."""

from __future__ import annotations

from collections import deque

from seatrial.job import Job
from seatrial.record.alerting import Alert, open_alerts
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.view import RunReader
from seatrial.watch.alerts.situation import Situation

_STEPS = 1000  # kept for the rules
_EVENTS_S = 86_400.0


class Follower:
    """One run."""

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._steps: deque[MetricsRecord] = deque(maxlen=_STEPS)
        self._reader = RunReader(folder, self._take, brief=True)
        self._reader.poll()

    def open_alerts(self) -> list[Alert]:
        """The alerts that fire according to the record."""
        return open_alerts(self._reader.events)

    def look(self, now: float) -> Situation:
        """The run now."""
        self._reader.poll()
        first = self._reader.start
        own = [e for e in self._reader.events if e.generation >= first]
        return Situation(
            now=now,
            run=str(self._folder.path),
            job=str(self._folder.job_toml),
            started=own[0].time if own else now,
            events=[e for e in own if e.time > now - _EVENTS_S],
            steps=list(self._steps),
            total_steps=self._job.train.steps,
        )

    def _take(self, record: MetricsRecord | Event) -> None:
        if isinstance(record, MetricsRecord):
            while self._steps and self._steps[-1].step >= record.step:
                self._steps.pop()  # done again
            self._steps.append(record)
