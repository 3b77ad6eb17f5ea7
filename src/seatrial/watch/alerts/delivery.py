"""Delivers alerts, with one thread per receiver: retries, refreshes, no duplicates.

Deliveries are recorded in control/alerts_delivered.json, so that a restarted monitor, or one on another node, does
not repeat them. If that file cannot be written, as on a full disk, alerts are still delivered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seatrial.base.atomic import write_json
from seatrial.base.complain import complain
from seatrial.base.files import read_json
from seatrial.record import messages as msg
from seatrial.record.alerting import Alert
from seatrial.watch.alerts.receivers import Receiver, Undelivered
from seatrial.watch.monitor_task import Send

_RETRIES_S = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 300.0, 300.0, 300.0, 300.0, 300.0)  # half an hour
_Mark = list[Any]  # identifies the delivered version of an alert; JSON types only


class Delivery:
    """Delivery to all receivers of a run."""

    def __init__(self, receivers: Iterable[Receiver], file: Path, send: Send) -> None:
        self._store = _Store(file)
        self._lines = [_ReceiverQueue(receiver, self._store, send) for receiver in receivers]

    def start(self, known: Iterable[Alert]) -> None:
        """Start the threads. `known`: the latest recorded alert of each key."""
        for alert in known:
            for line in self._lines:
                line.add(alert, recorded=True)
        for line in self._lines:
            line.thread.start()

    def add(self, alert: Alert) -> None:
        """Queue an alert that fires, was updated, or is resolved."""
        for line in self._lines:
            line.add(alert)

    def close(self, until: float) -> None:
        """Try pending deliveries once more, until `until` (time.monotonic)."""
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.thread.join(max(0.0, until - time.monotonic()))


class _ReceiverQueue:
    """One receiver and its pending alerts."""

    def __init__(self, receiver: Receiver, store: _Store, send: Send) -> None:
        self._receiver, self._store, self._send = receiver, store, send
        self._condition = threading.Condition()
        self._pending: dict[str, Alert] = {}  # key -> latest
        self._firing: dict[str, Alert] = {}  # delivered, to be refreshed
        self._failures = 0  # in a row
        self._ending = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def add(self, alert: Alert, *, recorded: bool = False) -> None:
        """`recorded`: from an earlier monitor, which may have delivered it."""
        delivered = self._store.mark(self._receiver.name, alert.key)
        with self._condition:
            if recorded and alert.state == "firing" and delivered == _mark(alert):
                self._firing[alert.key] = alert
            else:
                self._pending[alert.key] = alert
                self._condition.notify()

    def end(self) -> None:
        with self._condition:
            self._ending = True
            self._condition.notify()

    def _run(self) -> None:
        refresh_s = self._receiver.refresh_s
        retry_at = refresh_at = time.monotonic()
        while True:
            with self._condition:
                due = [
                    t for t in (retry_at if self._pending else None, refresh_at if refresh_s else None) if t
                ]
                wait_s = min(due) - time.monotonic() if due else None
                if not self._ending and (wait_s is None or wait_s > 0):
                    self._condition.wait(wait_s)
                ending = self._ending
            now = time.monotonic()
            if self._pending and (ending or now >= retry_at):
                retry_at = now + self._deliver()
            if refresh_s is not None and now >= refresh_at:
                self._refresh()
                refresh_at = now + refresh_s
            if ending:
                return

    def _deliver(self) -> float:
        """Send what is pending; returns the seconds until the next attempt."""
        for alert in list(self._pending.values()):
            known = self._store.mark(self._receiver.name, alert.key) is not None
            if alert.state == "firing" or known:  # a resolved alert that was never delivered is dropped
                try:
                    self._receiver.send(alert, time.time())
                except Undelivered as error:
                    return self._failed(str(error))
                self._failures = 0
            self._delivered(alert)
        return 0.0

    def _delivered(self, alert: Alert) -> None:
        with self._condition:
            if self._pending.get(alert.key) is alert:
                del self._pending[alert.key]
            if alert.state == "firing":
                self._firing[alert.key] = alert
            else:
                self._firing.pop(alert.key, None)
        self._store.put(self._receiver.name, alert.key, _mark(alert) if alert.state == "firing" else None)

    def _failed(self, reason: str) -> float:
        self._failures += 1
        name = self._receiver.name
        if self._failures == 1:
            text = f"cannot deliver alerts to the {name}: {reason}; retrying for half an hour"
            self._send(msg.MonitorFailed("alert_delivery_failed", text, {"to": name, "error": reason}))
        if self._failures <= len(_RETRIES_S):
            return _RETRIES_S[self._failures - 1]
        with self._condition:
            self._pending.clear()  # they stay in alerts.jsonl
        self._failures = 1  # reported already; the next alert starts new retries
        return 0.0

    def _refresh(self) -> None:
        for alert in list(self._firing.values()):
            try:
                self._receiver.send(alert, time.time())
            except Undelivered as error:
                if not self._failures:
                    self._failed(str(error))
                return
            self._failures = 0


class _Store:
    """Which version of each firing alert was delivered, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._marks: dict[str, dict[str, _Mark]] = {}  # receiver -> key -> mark
        try:
            found = read_json(path)
            for receiver, marks in found.items():
                self._marks[receiver] = {key: list(mark) for key, mark in marks.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError, TypeError) as error:
            complain(f"cannot read {path}, alerts may be delivered twice: {error}")
            self._marks = {}

    def mark(self, receiver: str, key: str) -> _Mark | None:
        with self._lock:
            return self._marks.get(receiver, {}).get(key)

    def put(self, receiver: str, key: str, mark: _Mark | None) -> None:
        """Record a delivery; None: the alert is resolved, forget it."""
        with self._lock:
            marks = self._marks.setdefault(receiver, {})
            if mark is None:
                marks.pop(key, None)
            else:
                marks[key] = mark
            try:
                write_json(self._path, self._marks)
            except OSError as error:
                complain(f"could not write {self._path}: {error}")


def _mark(alert: Alert) -> _Mark:
    return [alert.since, sorted(alert.nodes)]
