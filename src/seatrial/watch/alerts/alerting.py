"""The alerts of a live run: looks at it, evaluates the rules, and has what changed recorded."""

from __future__ import annotations

from seatrial.base.atomic import finite
from seatrial.job import Job
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.watch.alerts.book import AlertBook
from seatrial.watch.alerts.conditions import evaluate
from seatrial.watch.alerts.follow import Follower
from seatrial.watch.alerts.rules import rules
from seatrial.watch.follows import Tell


class Alerting:
    """Part of the monitor's process."""

    def __init__(self, folder: RunFolder, job: Job, tell: Tell) -> None:
        self._tell = tell
        self._follower = Follower(folder, job)
        self._rules = rules()
        self._book = AlertBook(self._rules, self._follower.open_alerts())

    def poll(self, now: float) -> None:
        situation = self._follower.look(now)
        found = evaluate(situation, self._rules, self._book.firing)
        for alert in self._book.update(found, now):
            self._tell(msg.MonitorAlert(**vars(alert) | {"evidence": finite(alert.evidence)}))

    def close(self, until: float) -> None:
        pass
