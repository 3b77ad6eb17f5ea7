"""Alerts in events.jsonl: events of kind "alert", one when an alert starts to fire, one when it is resolved.

The monitor process evaluates them (`watch.alerts`); everything that shows alerts reads them here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from seatrial.record.events import Event
from seatrial.record.typed import decode

KIND = "alert"
State = Literal["firing", "resolved"]


@dataclass(frozen=True)
class Alert:
    """One alert as last recorded. `key` is its identity from the first event to the one that resolves it."""

    rule: str
    key: str
    state: State
    severity: str
    message: str
    since: float  # unix seconds: when its condition began to hold
    time: float  # unix seconds: of this event
    nodes: list[int]  # empty: it concerns the whole run
    rank: int | None
    evidence: dict[str, Any]  # values and limits, by name
    command: str | None  # suggested command

    def event_data(self) -> dict[str, Any]:
        """The data of the event that records it."""
        names = ("rule", "state", "key", "since", "evidence", "nodes", "command")
        return {name: getattr(self, name) for name in names}

    def resolved(self, message: str, now: float) -> Alert:
        """The same alert at its end."""
        return replace(self, state="resolved", severity="info", message=message, time=now, command=None)


def alert_of(event: Event) -> Alert | None:
    """The alert that `event` records; None for another event, or a damaged one."""
    if event.kind != KIND or event.data is None:
        return None
    own = {"severity": event.severity, "message": event.message, "time": event.time, "rank": event.rank}
    try:
        return decode(Alert, event.data | own)
    except ValueError:
        return None


def last_alerts(events: Iterable[Event]) -> list[Alert]:
    """The latest alert of each key in `events`, ordered by the start of their conditions."""
    found: dict[str, Alert] = {}
    for event in events:
        alert = alert_of(event)
        if alert is not None:
            found[alert.key] = alert
    return sorted(found.values(), key=lambda alert: (alert.since, alert.key))


def open_alerts(events: Iterable[Event]) -> list[Alert]:
    """The alerts that fire according to `events`, the oldest first."""
    return [alert for alert in last_alerts(events) if alert.state == "firing"]
