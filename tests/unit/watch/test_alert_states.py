"""Alerts over time: durations, hysteresis, groups, restarts, and no storm whatever the conditions do."""

from __future__ import annotations

from dataclasses import replace

from alert_cases import alert
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.job.alert_rules import Rule
from seatrial.record.alerting import Alert, open_alerts
from seatrial.record.events import Event
from seatrial.watch.alerts.alert_states import AlertStates
from seatrial.watch.alerts.conditions import ConditionMatch

RULE = Rule("hot", "warning", 60.0, 120.0, "hot", "", "notes", {})
HOUR_S = 3600.0


def found(*nodes: int) -> ConditionMatch:
    return ConditionMatch("hot", {"limit": 1.0}, list(nodes), None, "look")


class Days:
    """The state of one rule, updated every `every_s`."""

    def __init__(self, rule: Rule = RULE, firing: list[Alert] | None = None, every_s: float = 10.0) -> None:
        self.states = AlertStates({rule.name: rule}, firing or [])
        self.now, self.every_s, self.sent = 1e9, every_s, list[Alert]()

    def holds(self, seconds: float, what: ConditionMatch | None) -> list[Alert]:
        """What is recorded while it holds, or does not, for so long."""
        changes: list[Alert] = []
        for _ in range(max(1, round(seconds / self.every_s))):
            changes += self.states.update({} if what is None else {"hot": what}, self.now)
            self.now += self.every_s
        self.sent += changes
        return changes


def test_an_alert_fires_once_and_is_resolved_once() -> None:
    days = Days()
    assert days.holds(60, found(1)) == []
    (fires,) = days.holds(1000, found(1))
    assert (fires.state, fires.since, fires.time, fires.nodes) == ("firing", 1e9, 1e9 + 60, [1])
    assert days.holds(110, None) == []
    (resolved,) = days.holds(1000, None)
    assert (resolved.state, resolved.key, resolved.severity, resolved.command) == (
        "resolved",
        "hot",
        "info",
        None,
    )


def test_short_conditions_and_short_pauses_are_ignored() -> None:
    days = Days()
    for _ in range(20):
        assert days.holds(50, found(1)) == []
        assert days.holds(10, None) == []
    assert len(days.holds(80, found(1))) == 1
    for _ in range(20):
        assert days.holds(100, None) == []
        assert days.holds(10, found(1)) == []


def test_further_nodes_are_recorded_every_five_minutes_at_most() -> None:
    days = Days()
    (fires,) = days.holds(80, found(1))
    later = [a for n in range(2, 62) for a in days.holds(10, found(*range(1, n)))]
    assert [len(a.nodes) for a in later] == [29, 59]
    assert {a.since for a in later} == {fires.since}
    assert days.holds(1000, found(1)) == []  # fewer are no news


def test_a_restarted_monitor_continues() -> None:
    days = Days()
    (fires,) = days.holds(80, found(1))
    again = Days(firing=[fires])
    again.now = days.now
    assert again.holds(1000, found(1)) == []
    (resolved,) = again.holds(1000, None)
    assert (resolved.key, resolved.since) == (fires.key, fires.since)
    (gone,) = Days(firing=[alert("no-such-rule")]).holds(10, None)
    assert gone.state == "resolved"


@given(
    st.lists(st.tuples(st.floats(1, 5000), st.booleans()), max_size=300),
    st.sampled_from([0.0, 60.0]),
    st.sampled_from([0.0, 120.0]),
)
@settings(max_examples=60)
def test_no_history_makes_an_alert_storm(
    phases: list[tuple[float, bool]], for_s: float, clear_s: float
) -> None:
    days = Days(replace(RULE, for_s=for_s, clear_s=clear_s), every_s=30.0)
    for seconds, holds in phases:
        days.holds(min(seconds, 3000), found(1) if holds else None)
    times = [a.time for a in days.sent]
    assert all(sum(t <= other < t + HOUR_S for other in times) <= 14 for t in times)
    assert [a.state for a in days.sent] == ["firing", "resolved"] * (len(times) // 2) + ["firing"] * (
        len(times) % 2
    )
    for fires, resolved in zip(days.sent[::2], days.sent[1::2], strict=False):
        assert fires.since == resolved.since
        assert fires.time - fires.since >= for_s


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=15)
def test_a_condition_that_flips_for_a_day(on: int, off: int) -> None:
    """With a rule that fires and is resolved at once, the worst case."""
    days = Days(replace(RULE, for_s=0.0, clear_s=0.0), every_s=30.0)
    while days.now < 1e9 + 24 * HOUR_S:
        days.holds(on * 30.0, found(1))
        days.holds(off * 30.0, None)
    assert len(days.sent) <= 24 * 14


def test_open_alerts_are_those_not_resolved() -> None:
    def recorded(one: Alert) -> Event:
        return Event(one.time, 1, "alert", one.severity, one.message, None, one.rank, one.event_data())

    first, second = alert("a", since=5.0), alert("b", since=3.0)
    events = [recorded(first), recorded(second), recorded(replace(first, nodes=[1, 2], time=first.time + 9))]
    damaged = Event(1.0, 1, "alert", "warning", "m", None, None, {"rule": "c"})
    assert [(a.rule, a.nodes) for a in open_alerts([*events, damaged])] == [("b", []), ("a", [1, 2])]
    assert [a.rule for a in open_alerts([*events, recorded(second.resolved("gone", 9.0))])] == ["a"]
