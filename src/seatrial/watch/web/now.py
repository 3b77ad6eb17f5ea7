"""The first screen: progress, what needs attention, today's lost time, deviating ranks, spares, checkpoint."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from seatrial.record.alerting import open_alerts
from seatrial.record.events import Event
from seatrial.record.goodput import LABELS
from seatrial.ui import figures
from seatrial.ui.goodput_words import mtbf_words
from seatrial.ui.recovery import message_of
from seatrial.ui.summary import shown_events
from seatrial.watch.web import heat
from seatrial.watch.web.polled_run import PolledRun

_LAST_EVENTS = 8
_MOST_PROBLEMS = 5


def now(polled: PolledRun) -> dict[str, Any]:
    """The document that is pushed to browsers. Times are unix seconds; browsers compute ages."""
    view, known = polled.view, polled.complete or polled.ranks.account is not None
    return {
        "name": view.folder.path.absolute().name,
        "state": {"state": view.state, "reason": view.state_reason, "generation": view.generation},
        "moving": _moving(polled),
        "attention": needs_attention(polled),
        "lost": _lost(polled),
        "reserve": _reserve(polled),
        "checkpoint": _checkpoint(polled),
        "heat": heat.heat(polled, heat.OWN_WORK) if known else {"why": "reading ...", "values": []},
        "events": [event_row(event) for event in shown_events(view)[-_LAST_EVENTS:]][::-1],
        "missing": [str(problem) for problem in view.problems[:_MOST_PROBLEMS]],
        "missing_count": len(view.problems),
        "counts": {"events": len(view.events), "steps": view.step},
    }


def _moving(polled: PolledRun) -> dict[str, Any]:
    view, last, waterfall = polled.view, polled.view.last, polled.ranks.waterfall
    runs = view.state == "running"
    left = None if view.job.steps is None else max(0, view.job.steps - view.step)
    planned = None if waterfall is None else waterfall.predicted_step_s
    found: dict[str, Any] = {
        "step": view.step,
        "steps": view.job.steps,
        "eta_s": view.eta_s if runs else None,
        "planned_s": None if planned is None or left is None or not runs else planned * left,
        "why_no_plan": polled.ranks.why_no_prediction,
        "underway": polled.underway,
    }
    if last is None:
        return found
    return found | {
        "time": last.time,
        "late_s": figures.late_after_s(last, polled.view.job.batches) if runs else None,
        "step_s": last.step_time_s,
        "loss": last.loss,
        "validation": _validation(polled),
        "grad_norm": last.grad_norm,
        "experts": figures.experts(last) or None,
        "tokens_per_s": last.tokens_per_s,
        "each": last.tokens_per_s_per_gpu,
        "unit": figures.unit(view.device),
        "mfu": last.mfu,
        "memory": figures.memory(last.memory_bytes),
        "tokens": view.tokens,
    }


def _validation(polled: PolledRun) -> dict[str, Any] | None:
    """The latest validation loss and its step; None: not measured."""
    history = polled.view.history
    known = np.flatnonzero(np.isfinite(np.asarray(history.column("validation_loss"), np.float64)))
    if not known.size:
        return None
    place = int(known[-1])
    return {"step": history.steps[place], "loss": history.column("validation_loss")[place]}


def _lost(polled: PolledRun) -> dict[str, Any] | None:
    """Today's seconds outside steps that count, by cause; None: not read yet."""
    whole, today = polled.whole, polled.today
    if whole is None:
        return {"why": "no start is recorded"} if polled.complete else None
    mtbf = f"mean time between failures of the run: {mtbf_words(whole.mtbf)}"
    if today is None:
        return {"why": "the run ended before today", "mtbf": mtbf}
    causes = [name for name in LABELS if name != "productive"]
    rows = [{"label": LABELS[name], "value": round(today.seconds[name], 1)} for name in causes]
    return {
        "rows": sorted(rows, key=lambda row: -float(str(row["value"]))),
        "lost_s": round(sum(today.seconds[name] for name in causes), 1),
        "wall_s": round(today.wall_s, 1),
        "ettr": today.ettr,
        "ettr_all": whole.ettr,
        "mtbf": mtbf,
    }


def needs_attention(polled: PolledRun) -> list[dict[str, Any]]:
    """Problems that need action, worst first, with node and command if known."""
    view = polled.view
    run = shlex.quote(str(view.folder.path))
    found = []
    if view.failure is not None:
        failure = view.failure
        logs = f"seatrial logs {run}"
        if failure.rank is not None:
            logs += f" --rank {failure.rank}"
        elif failure.node is not None:
            logs += f" --node {failure.node}"
        found.append(
            _item("error", failure.message, failure.time, failure.node, failure.rank, logs, failure.hint)
        )
    elif view.state in ("failed", "stopped", "preempted"):
        found.append(_item("warning", f"{view.state}: {view.state_reason}", _last_time(polled)))
    if view.state in ("running", "queued"):
        for alert in open_alerts(view.own_events):
            nodes = (
                f"nodes {figures.steps(alert.nodes).removeprefix('steps ')}: " if len(alert.nodes) > 1 else ""
            )
            node = alert.nodes[0] if len(alert.nodes) == 1 else None
            evidence = ", ".join(
                f"{name} {_short(value)}" for name, value in list(alert.evidence.items())[:6]
            )
            what = f"{nodes}{alert.message}"
            found.append(_item(alert.severity, what, alert.since, node, alert.rank, alert.command, evidence))
        for node, how in sorted(polled.nodes.gone.items()):
            event = _last_event(view.own_events, node)
            what = f"node {node} {how}" if event is None else event.message
            since = None if event is None else event.time
            found.append(_item("warning", what, since, node, None, f"seatrial logs {run} --node {node}"))
    found += [
        _item("error", gap, None, None, None, f"seatrial verify {run}", "the ledger of samples has a gap")
        for gap in view.ledger_gaps[:3]
    ]
    order = {"error": 0, "warning": 1}
    return sorted(found, key=lambda item: order.get(item["severity"], 2))


def _item(
    severity: str,
    what: str,
    since: float | None,
    node: int | None = None,
    rank: int | None = None,
    command: str | None = None,
    hint: str = "",
) -> dict[str, Any]:
    return {
        "severity": severity,
        "what": what,
        "since": since,
        "node": node,
        "rank": rank,
        "command": command,
        "hint": hint,
    }


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


def _last_event(events: list[Event], node: int) -> Event | None:
    kinds = ("node_lost", "node_evicted", "node_left")
    return next((e for e in reversed(events) if e.node == node and e.kind in kinds), None)


def _last_time(polled: PolledRun) -> float | None:
    events = polled.view.events
    return events[-1].time if events else None


def _reserve(polled: PolledRun) -> dict[str, Any]:
    nodes = polled.nodes
    return {
        "known": bool(nodes.training),
        "training": len([n for n in nodes.training if n not in nodes.gone]),
        "spares": nodes.spares,
        "idle_s": None if polled.whole is None else round(sum(polled.whole.idle_node_s.values())),
        "gone": [{"node": node, "how": how} for node, how in sorted(nodes.gone.items())],
    }


def _checkpoint(polled: PolledRun) -> dict[str, Any] | None:
    view = polled.view
    if view.latest is None:
        return None
    return {
        "step": view.latest.step,
        "time": view.latest.time,
        "where": view.latest.where,
        "kept": len(view.checkpoints),
        "verified": _verified(polled, view.latest.step),
        "command": f"seatrial verify {shlex.quote(view.latest.where)}",
        "at_risk": max(0, view.step - view.latest.step),
    }


def _verified(polled: PolledRun, step: int) -> bool | None:
    """True if a start resumed from this checkpoint, which compares every byte with its hash; False: damaged; None: not read back."""
    for event in reversed(polled.view.events):
        if (event.data or {}).get("step") == step:
            if event.kind == "resumed":
                return True
            if event.kind in ("checkpoint_damaged", "checkpoint_set_aside"):
                return False
            if event.kind == "checkpoint_saved":
                return None
    return None


def event_row(event: Event) -> dict[str, Any]:
    """One row of the event list."""
    return {
        "time": event.time,
        "severity": event.severity if event.severity in ("warning", "error") else "info",
        "kind": event.kind,
        "text": message_of(event),
        "node": event.node,
        "rank": event.rank,
        "generation": event.generation,
    }
