"""The alerts of a live run: looks at it, evaluates the rules, has what changed recorded and delivered."""

from __future__ import annotations

import os

from seatrial.base.atomic import finite
from seatrial.job import Job
from seatrial.job.alert_rules import rules_of
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.watch.alerts.book import AlertBook
from seatrial.watch.alerts.conditions import evaluate
from seatrial.watch.alerts.delivery import Delivery
from seatrial.watch.alerts.follow import Follower
from seatrial.watch.alerts.receivers import receivers
from seatrial.watch.follows import Tell


class Alerting:
    """Part of the monitor's process."""

    def __init__(self, folder: RunFolder, job: Job, tell: Tell) -> None:
        watch = job.file.watch
        self._tell = tell
        self._follower = Follower(folder, job)
        self._rules = rules_of(watch.alerts_off, watch.alerts)
        known = self._follower.alerts()
        self._book = AlertBook(self._rules, [alert for alert in known if alert.state == "firing"])
        self._delivery = Delivery(receivers(watch, job.name, os.environ), folder.alerts_delivered, tell)
        self._delivery.start(known)

    def poll(self, now: float) -> None:
        situation = self._follower.look(now)
        found = evaluate(situation, self._rules, self._book.firing)
        for alert in self._book.update(found, now):
            self._tell(msg.MonitorAlert(**vars(alert) | {"evidence": finite(alert.evidence)}))
            self._delivery.add(alert)

    def close(self, until: float) -> None:
        self._delivery.close(until)
