"""When an alert begins to fire and when it is resolved: durations, hysteresis in time, and a bound on flapping. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from seatrial.job.alert_rules import Rule
from seatrial.record.alerting import Alert
from seatrial.watch.alerts.conditions import Found

_HOUR_S = 3600.0
_LEAST_CLEAR_S = 30.0  # that is doubled, where a rule is resolved at once
_UPDATE_S = 300.0  # at least, between two events of one alert that grows


@dataclass
class _Entry:
    """What is known of one rule."""

    since: float | None = None  # when its condition began to hold, without a pause
    gone: float | None = None  # when it ceased to hold, while the alert fires
    alert: Alert | None = None  # while it fires
    fired: tuple[float, ...] = ()  # when, in the last hour


class AlertBook:
    """The state of all rules. At any time a rule has one alert, which lists all nodes concerned."""

    def __init__(self, rules: Mapping[str, Rule], firing: Iterable[Alert] = ()) -> None:
        """`firing`: the alerts that fire according to the record, of an earlier monitor."""
        self._rules = rules
        self._entries = {name: _Entry() for name in rules}
        self._orphans = []  # of rules that were turned off, or of another version
        for alert in firing:
            if alert.rule in self._entries:
                self._entries[alert.rule] = _Entry(alert.since, None, alert, (alert.time,))
            else:
                self._orphans.append(alert)

    @property
    def firing(self) -> dict[str, Alert]:
        """Rule -> its alert, of those that fire."""
        return {name: e.alert for name, e in self._entries.items() if e.alert is not None}

    def update(self, found: Mapping[str, Found | None], now: float) -> list[Alert]:
        """What to record, given the rules whose conditions hold `now` (unix seconds)."""
        changes = [a.resolved(f"no longer a rule: {a.message}", now) for a in self._orphans]
        self._orphans = []
        for name, entry in self._entries.items():
            change = self._step(self._rules[name], entry, found.get(name), now)
            if change is not None:
                changes.append(change)
        return changes

    def _step(self, rule: Rule, entry: _Entry, found: Found | None, now: float) -> Alert | None:
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
        """How long its condition must not hold: twice as long with every firing of the last hour but the first."""
        again = len(entry.fired) - 1
        if again <= 0:
            return rule.clear_s
        return float(min(_HOUR_S, max(rule.clear_s, _LEAST_CLEAR_S) * 2**again))

    def _fire(self, rule: Rule, entry: _Entry, found: Found, now: float) -> Alert:
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

    def _grow(self, rule: Rule, entry: _Entry, found: Found, now: float) -> Alert | None:
        """Further nodes: recorded again, every few minutes at most."""
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
