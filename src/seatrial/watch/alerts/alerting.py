"""Evaluates the alert rules of a live run, and records and delivers what changed."""

from __future__ import annotations

import os

from seatrial.base.atomic import finite
from seatrial.job import Job
from seatrial.job.alert_rules import rules_of
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.watch.alerts.alert_states import AlertStates
from seatrial.watch.alerts.conditions import evaluate
from seatrial.watch.alerts.delivery import Delivery
from seatrial.watch.alerts.receivers import receivers
from seatrial.watch.alerts.situation_reader import SituationReader
from seatrial.watch.monitor_task import Send


class Alerting:
    """The monitor's task that does so."""

    def __init__(self, folder: RunFolder, job: Job, send: Send) -> None:
        watch = job.file.watch
        self._send = send
        self._follower = SituationReader(folder, job)
        self._rules = rules_of(watch.alerts_off, watch.alerts)
        known = self._follower.alerts()
        self._states = AlertStates(self._rules, [alert for alert in known if alert.state == "firing"])
        self._delivery = Delivery(receivers(watch, job.name, os.environ), folder.alerts_delivered, send)
        self._delivery.start(known)

    def poll(self, now: float) -> None:
        situation = self._follower.look(now)
        found = evaluate(situation, self._rules, self._states.firing)
        for alert in self._states.update(found, now):
            self._send(msg.MonitorAlert(**vars(alert) | {"evidence": finite(alert.evidence)}))
            self._delivery.add(alert)

    def close(self, until: float) -> None:
        self._delivery.close(until)
