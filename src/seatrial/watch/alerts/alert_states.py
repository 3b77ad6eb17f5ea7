"""When an alert starts to fire and when it is resolved: durations, hysteresis over time, and a limit on flapping. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from seatrial.job.alert_rules import Rule
from seatrial.record.alerting import Alert
from seatrial.watch.alerts.conditions import ConditionMatch

_HOUR_S = 3600.0
_LEAST_CLEAR_S = 30.0  # the base of the back-off where a rule has clear_s = 0
_UPDATE_S = 300.0  # minimum time between two updates of a firing alert


@dataclass
class _Entry:
    """State of one rule."""

    since: float | None = None  # since when its condition has held
    gone: float | None = None  # while firing: since when it no longer holds
    alert: Alert | None = None  # while it fires
    fired: tuple[float, ...] = ()  # times of firing in the last hour


class AlertStates:
    """The state of all rules. A rule has at most one firing alert, which lists all affected nodes."""

    def __init__(self, rules: Mapping[str, Rule], firing: Iterable[Alert] = ()) -> None:
        """`firing`: alerts that an earlier monitor recorded as firing."""
        self._rules = rules
        self._entries = {name: _Entry() for name in rules}
        self._orphans = []  # alerts whose rule was turned off or no longer exists
        for alert in firing:
            if alert.rule in self._entries:
                self._entries[alert.rule] = _Entry(alert.since, None, alert, (alert.time,))
            else:
                self._orphans.append(alert)

    @property
    def firing(self) -> dict[str, Alert]:
        """The firing alert of each rule."""
        return {name: e.alert for name, e in self._entries.items() if e.alert is not None}

    def update(self, found: Mapping[str, ConditionMatch | None], now: float) -> list[Alert]:
        """Advance to `now` (unix seconds); returns the alerts to record. `found`: rule -> match, None if its condition does not hold."""
        changes = [a.resolved(f"no longer a rule: {a.message}", now) for a in self._orphans]
        self._orphans = []
        for name, entry in self._entries.items():
            change = self._step(self._rules[name], entry, found.get(name), now)
            if change is not None:
                changes.append(change)
        return changes

    def _step(self, rule: Rule, entry: _Entry, found: ConditionMatch | None, now: float) -> Alert | None:
        entry.fired = tuple(at for at in entry.fired if at > now - _HOUR_S)
        if found is not None:
            entry.gone = None
            entry.since = now if entry.since is None else min(entry.since, now)
            if entry.alert is None:
                return self._fire(rule, entry, found, now) if now - entry.since >= rule.for_s else None
            return self._grow(rule, entry, found, now)
        if entry.alert is None:
            entry.since = None
            return None
        entry.gone = now if entry.gone is None else min(entry.gone, now)
        if now - entry.gone < self._clear_s(rule, entry):
            return None
        resolved = entry.alert.resolved(f"resolved: {entry.alert.message}", now)
        entry.since = entry.gone = entry.alert = None
        return resolved

    def _clear_s(self, rule: Rule, entry: _Entry) -> float:
        """How long the condition must be clear before the alert is resolved: doubled for each repeat within the last hour."""
        again = len(entry.fired) - 1
        if again <= 0:
            return rule.clear_s
        return float(min(_HOUR_S, max(rule.clear_s, _LEAST_CLEAR_S) * 2**again))

    def _fire(self, rule: Rule, entry: _Entry, found: ConditionMatch, now: float) -> Alert:
        assert entry.since is not None
        entry.fired += (now,)
        entry.alert = Alert(
            rule=rule.name,
            key=rule.name,
            state="firing",
            severity=rule.severity,
            message=found.message,
            since=entry.since,
            time=now,
            nodes=found.nodes,
            rank=found.rank,
            evidence=dict(found.evidence),
            command=found.command,
        )
        return entry.alert

    def _grow(self, rule: Rule, entry: _Entry, found: ConditionMatch, now: float) -> Alert | None:
        """The alert with newly affected nodes added, at most every few minutes."""
        alert = entry.alert
        assert alert is not None
        if set(found.nodes) <= set(alert.nodes) or now - alert.time < _UPDATE_S:
            return None
        entry.alert = replace(
            alert,
            message=found.message,
            time=now,
            nodes=found.nodes,
            rank=found.rank,
            evidence=dict(found.evidence),
            command=found.command,
        )
        return entry.alert
