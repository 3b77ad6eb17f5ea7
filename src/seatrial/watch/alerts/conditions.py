"""The condition of each rule: whether it holds now, and the evidence. Pure functions of a `Situation`.

A condition gets the limits of its rule and the alert that fires already, None if none does: a value between `clear` and
`limit` keeps an alert, and begins none. Where the run has decided something itself, the condition refers to its event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from seatrial.base import units
from seatrial.record.alerting import Alert
from seatrial.record.events import Event
from seatrial.watch.alerts.rules import Rule
from seatrial.watch.alerts.situation import Situation


@dataclass(frozen=True)
class Found:
    """A condition that holds."""

    message: str
    evidence: Mapping[str, Any]
    nodes: list[int]
    rank: int | None
    command: str | None


Condition = Callable[[Situation, Rule, Alert | None], Found | None]


def evaluate(
    situation: Situation, rules: Mapping[str, Rule], firing: Mapping[str, Alert]
) -> dict[str, Found]:
    """Rule -> what was found, of those whose condition holds."""
    answers = {name: CONDITIONS[name](situation, rule, firing.get(name)) for name, rule in rules.items()}
    return {name: found for name, found in answers.items() if found is not None}


def nonfinite(s: Situation, rule: Rule, held: Alert | None) -> Found | None:
    return _by_events(s, rule, s.recent(("nonfinite",), rule.limits["window_s"]))


def loss_spike(s: Situation, rule: Rule, held: Alert | None) -> Found | None:
    return _by_events(s, rule, s.recent(("loss_spike",), rule.limits["window_s"]))


def no_progress(s: Situation, rule: Rule, held: Alert | None) -> Found | None:
    seconds = [each.step_time_s for each in s.steps[-50:]]
    last = s.steps[-1] if s.steps else None
    since = s.started if last is None else max(last.time, s.started)
    usual = median(seconds) if seconds else None
    limit = max(rule.limits["least_s"], rule.limits["factor"] * (usual or 0))
    if last is None or last.time < s.started:
        limit = max(limit, rule.limits["first_step_s"])
    elif s.total_steps is not None and last.step >= s.total_steps:
        return None
    age = s.now - since
    if age <= limit:
        return None
    step = 0 if last is None else last.step
    evidence = {"age_s": round(age, 1), "limit_s": round(limit, 1), "usual_step_s": usual, "step": step}
    why = next((e for e in reversed(s.events) if e.kind in _STANDSTILL and e.time >= since), None)
    return _found(s, rule, f"for {units.duration(age)} after step {step}", evidence, event=why)


_STANDSTILL = ("recovering", "waiting_for_nodes", "step_overdue", "hang_blamed", "checkpoint_overdue")


def _by_events(s: Situation, rule: Rule, events: Sequence[Event]) -> Found | None:
    """As long as there are such events."""
    if not events:
        return None
    last = events[-1]
    times = "" if len(events) == 1 else f", {len(events)} times"
    nodes = sorted({e.node for e in events if e.node is not None})
    evidence = {"events": len(events), "window_s": rule.limits["window_s"]}
    return _found(s, rule, f"{last.message}{times}", evidence, nodes=nodes, rank=last.rank, event=last)


def _found(
    s: Situation,
    rule: Rule,
    detail: str,
    evidence: Mapping[str, Any],
    *,
    nodes: Sequence[int] = (),
    rank: int | None = None,
    event: Event | None = None,
) -> Found:
    """With the rule's texts. `event`: what the run recorded of it."""
    if event is not None:
        seen = {"kind": event.kind, "time": event.time, "message": event.message}
        own = (event.data or {}).get("evidence")
        evidence = {**evidence, "event": {**seen, "evidence": own} if own else seen}
    values = {"run": s.run, "job": s.job, "node": str(nodes[0]) if nodes else ""}
    command = rule.command.format_map(values) or None
    return Found(f"{rule.summary}: {detail}", evidence, list(nodes), rank, command)


CONDITIONS: Mapping[str, Condition] = {
    "nonfinite": nonfinite,
    "loss_spike": loss_spike,
    "no_progress": no_progress,
}
