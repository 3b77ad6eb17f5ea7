"""Situations for the alert rules, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.job.alert_rules import rules
from seatrial.record.alerting import Alert
from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.telemetry import Sample
from seatrial.watch.alerts.conditions import CONDITIONS, ConditionMatch
from seatrial.watch.alerts.situation import Situation

NOW = 1_800_000_000.0


def event(
    kind: str, ago: float = 10.0, *, node: int | None = None, rank: int | None = None, **data: Any
) -> Event:
    return Event(NOW - ago, 1, kind, "warning", f"{kind} happened", node, rank, data or None)


def steps(count: int, **columns: Any) -> list[MetricsRecord]:
    """The last `count` steps, one a second, the newest now. A column is a value, or a function of the step."""

    def record(step: int) -> MetricsRecord:
        values: dict[str, Any] = {
            "loss": 2.0,
            "grad_norm": 1.0,
            "step_time_s": 1.0,
            "tokens_per_s_per_gpu": 100.0,
        }
        values |= {name: value(step) if callable(value) else value for name, value in columns.items()}
        values.setdefault("time", NOW - (count - step))
        plain = {"tokens": step, "lr": 0.1, "data_wait_s": 0.0, "tokens_per_s": 800.0, "generation": 1}
        return MetricsRecord(step=step, mfu=None, memory_bytes=None, **plain | values)

    return [record(step) for step in range(1, count + 1)]


def samples(by_node: Mapping[int, Mapping[str, float]], ago: float = 0.0) -> dict[int, Sample]:
    return {node: Sample(NOW - ago, 10.0, dict(values), {}) for node, values in by_node.items()}


def situation(**more: Any) -> Situation:
    plain: dict[str, Any] = {"now": NOW, "run": "runs/a", "job": "runs/a/job.toml", "started": NOW - 5000}
    return Situation(**plain | {"events": [], "steps": steps(300)} | more)


def judge(rule: str, held: Alert | None = None, **more: Any) -> ConditionMatch | None:
    return CONDITIONS[rule](situation(**more), rules()[rule], held)


def fired(rule: str, **more: Any) -> Alert:
    """The alert that fires in that situation."""
    found = judge(rule, **more)
    assert found is not None
    return alert(rule, nodes=found.nodes, evidence=dict(found.evidence))


def alert(rule: str, **more: Any) -> Alert:
    plain: dict[str, Any] = {"state": "firing", "severity": "warning", "message": "m", "since": NOW - 60}
    plain |= {"time": NOW - 30, "nodes": [], "rank": None, "evidence": {}, "command": None}
    return Alert(rule=rule, key=rule, **plain | more)
