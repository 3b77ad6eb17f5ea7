"""The condition of each alert rule: whether it holds now, with evidence. Pure functions of a `Situation`.

A condition gets its rule and the firing alert (or None). Between `clear` and `limit` an alert stays as it is: it keeps
firing, but does not start. Where the run itself judges something, the condition refers to its event.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

from seatrial.base import units
from seatrial.hardware.counters import CONGESTION_SIGNALS
from seatrial.job.alert_rules import Rule
from seatrial.record.alerting import Alert
from seatrial.record.events import Event
from seatrial.record.series import parse_series
from seatrial.watch.alerts.situation import Situation

# Cached: all nodes have the same names, evaluated every second.
_parsed = lru_cache(maxsize=1 << 14)(parse_series)
_MOST_LISTED = 32  # nodes with values in the evidence; the alert itself lists all nodes
_LEAST_BEFORE = 20  # steps needed for a baseline
_STANDSTILL = ("recovering", "waiting_for_nodes", "step_overdue", "hang_blamed", "checkpoint_overdue")
_LINK_SIGNALS = ("link_errors", "link_down", "nvlink_errors", "sxid")
# Without the software power cap, which is normal under load.
HELD_BACK = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")


@dataclass(frozen=True)
class ConditionMatch:
    """A condition that holds, with its evidence."""

    message: str
    evidence: Mapping[str, Any]
    nodes: list[int]
    rank: int | None
    command: str | None


Condition = Callable[[Situation, Rule, Alert | None], ConditionMatch | None]


def evaluate(
    situation: Situation, rules: Mapping[str, Rule], firing: Mapping[str, Alert]
) -> dict[str, ConditionMatch]:
    """The match of each rule whose condition holds."""
    answers = {name: CONDITIONS[name](situation, rule, firing.get(name)) for name, rule in rules.items()}
    return {name: found for name, found in answers.items() if found is not None}


# -- judged by the run itself


def _of_kind(kind: str) -> Condition:
    def condition(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
        return _by_events(s, rule, s.recent((kind,), rule.limits["window_s"]))

    return condition


def _congestion(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    return _by_events(s, rule, _signals(s, rule, CONGESTION_SIGNALS))


def _link_errors(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    found = _by_events(s, rule, _signals(s, rule, _LINK_SIGNALS))
    if found is not None:
        return found
    replays: dict[int, float] = {}
    for node, grown in s.grown.items():
        counts = [n for series, n in grown.items() if series.startswith("gpu_pcie_replays_total")]
        replays[node] = max(counts, default=0.0)
    return _beyond(s, rule, held, replays, lambda n: f"{n:,.0f} PCIe replays of one GPU in 10 minutes")


def _signals(s: Situation, rule: Rule, names: Sequence[str]) -> list[Event]:
    """Abnormal counters reported by agents."""
    events = s.recent(("signal",), rule.limits["window_s"])
    return [e for e in events if str((e.data or {}).get("signal")).partition(":")[0] in names]


def _by_events(s: Situation, rule: Rule, events: Sequence[Event]) -> ConditionMatch | None:
    if not events:
        return None
    last = events[-1]
    nodes = sorted({e.node for e in events if e.node is not None})
    times = "" if len(events) == 1 else f" ({len(events)} times)"
    evidence = {"events": len(events), "window_s": rule.limits["window_s"]}
    return _found(s, rule, last.message + times, evidence, nodes=nodes, rank=last.rank, event=last)


# -- steps


def _no_progress(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    last = s.steps[-1] if s.steps and s.steps[-1].time >= s.started else None
    if last is not None and s.total_steps is not None and last.step >= s.total_steps:
        return None
    usual = None
    if s.steps:
        ahead = s.steps[-1].step + 1  # its batch may be larger
        usual = median(each.step_time_s * s.batches.growth(each.step, ahead) for each in s.steps[-50:])
    limit = max(rule.limits["least_s"], rule.limits["factor"] * (usual or 0))
    if last is None:
        limit = max(limit, rule.limits["first_step_s"])
    since = s.started if last is None else last.time
    age = s.now - since
    if age <= limit:
        return None
    step = s.steps[-1].step if s.steps else 0
    evidence = {"age_s": round(age, 1), "limit_s": round(limit, 1), "usual_step_s": usual, "step": step}
    why = next((e for e in reversed(s.events) if e.kind in _STANDSTILL and e.time >= since), None)
    detail = f"for {units.duration(age)} after step {step}{'' if why is None else f', {why.message}'}"
    nodes = [] if why is None or why.node is None else [why.node]
    return _found(s, rule, detail, evidence, nodes=nodes, rank=None if why is None else why.rank, event=why)


def _gradient_drift(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    if not s.steps or s.steps[-1].step < rule.limits["after_step"]:
        return None
    now, usual = _now_and_usual(rule, [each.grad_norm for each in s.steps], held)
    if now is None or usual is None or now < usual * rule.limits["limit" if held is None else "clear"]:
        return None
    evidence = {"now": now, "usual": usual, "factor": rule.limits["limit"], "step": s.steps[-1].step}
    return _found(s, rule, f"{now:.3g}, {now / usual:.1f} times the usual {usual:.3g}", evidence)


def _throughput_drop(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    # The first step of a generation compiles and connects.
    whole = [b for a, b in zip(s.steps, s.steps[1:], strict=False) if a.generation == b.generation]
    now, usual = _now_and_usual(rule, [each.tokens_per_s_per_gpu for each in whole], held)
    if now is None or usual is None or now > usual * rule.limits["limit" if held is None else "clear"]:
        return None
    evidence = {"now": now, "usual": usual, "share": now / usual, "limit": rule.limits["limit"]}
    text = f"by {1 - now / usual:.0%}, from {units.count(usual)} to {units.count(now)} per GPU"
    return _found(s, rule, text, evidence | {"step": whole[-1].step})


def _now_and_usual(rule: Rule, values: list[float], held: Alert | None) -> tuple[float | None, float | None]:
    """Median of the last steps, and the baseline before them. While the alert fires, the baseline is frozen."""
    values = [value for value in values if math.isfinite(value) and value > 0]
    few, many = int(rule.limits["steps"]), int(rule.limits["before"])
    now = median(values[-few:]) if len(values) >= few else None
    known = held.evidence.get("usual") if held is not None else None
    if isinstance(known, int | float) and known > 0:
        return now, float(known)
    before = values[-few - many : -few]
    enough = len(before) >= max(_LEAST_BEFORE, few, many // 4)
    return now, median(before) if enough else None


# -- hardware


def _gpu_hot(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    worst = _worst(s, held, "gpu_temperature_celsius", lambda labels: True)
    return _beyond(s, rule, held, worst, lambda value: f"{value:.0f} °C")


def _gpu_throttled(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    worst = _worst(s, held, "gpu_throttle_ratio", lambda labels: labels.get("reason") in HELD_BACK)
    return _beyond(s, rule, held, worst, lambda value: f"{value:.0%} of the time")


def _storage_full(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    free: dict[int, float] = {}
    where: dict[int, str] = {}
    for node, values in _fresh(s).items():
        for series, total in values.items():
            name, labels = _parsed(series)
            left = values.get(series.replace("storage_total_bytes", "storage_free_bytes"))
            if name != "storage_total_bytes" or left is None or total <= 0:
                continue
            if left / total < free.get(node, math.inf):
                free[node], where[node] = left / total, labels.get("storage", "")
    # `_beyond` compares upwards, so used space instead of free.
    used = {node: 1 - share for node, share in free.items()}
    limits = {name: 1 - rule.limits[name] for name in ("limit", "clear")}
    found = _beyond(s, rule, held, used, lambda value: f"{1 - value:.1%} free", limits)
    if found is None:
        return None
    stores = sorted({where[node] for node in found.nodes if node in where})
    evidence = {"free": min(free.values(), default=None), "limit": rule.limits["limit"], "storage": stores}
    return ConditionMatch(f"{found.message}: {', '.join(stores)}", evidence, found.nodes, None, found.command)


def _fresh(s: Situation) -> dict[int, Mapping[str, float]]:
    """Telemetry values by node, without stale nodes."""
    return {n: each.values for n, each in s.samples.items() if s.now - each.time <= 3 * each.every_s + 10}


def _worst(
    s: Situation, held: Alert | None, name: str, wanted: Callable[[Mapping[str, str]], bool]
) -> dict[int, float]:
    """The largest value of the series on each node."""
    found = {}
    for node, values in _fresh(s).items():
        of_node = [v for k, v in values.items() if k.startswith(name + "{") and wanted(_parsed(k)[1])]
        if of_node:
            found[node] = max(of_node)
    return found


def _beyond(
    s: Situation,
    rule: Rule,
    held: Alert | None,
    values: Mapping[int, float],
    text: Callable[[float], str],
    limits: Mapping[str, float] | None = None,
) -> ConditionMatch | None:
    """Nodes at `limit`, or at `clear` if the alert already lists them; of these, nodes without new values stay listed."""
    limits = rule.limits if limits is None else limits
    concerned = set() if held is None else set(held.nodes)
    high = {n: v for n, v in values.items() if v >= limits["clear" if n in concerned else "limit"]}
    unread = sorted(n for n in concerned if n not in values and n in s.training)
    if not high and not unread:
        return None
    listed = dict(sorted(high.items(), key=lambda item: -item[1])[:_MOST_LISTED])
    evidence: dict[str, Any] = {"limit": limits["limit"], "by_node": {str(n): v for n, v in listed.items()}}
    if unread:
        evidence["not_read"] = unread
    nodes = sorted([*high, *unread])
    worst = max(high.values(), default=None)
    values_text = "not read since" if worst is None else text(worst)
    most = "" if len(high) < 2 else " at most" if limits["limit"] < 1 else " at worst"
    return _found(s, rule, f"{_nodes(nodes)}: {values_text}{most}", evidence, nodes=nodes)


# -- checkpoints and nodes


def _checkpoint_overdue(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    if not s.steps:
        return None
    last, step = s.steps[-1], 0 if s.checkpoint is None else s.checkpoint.step
    since = s.started if s.checkpoint is None else max(s.started, s.checkpoint.time)
    waits = [e for e in s.events if e.kind == "checkpoint_overdue" and e.time > since]
    failed = [e for e in s.events if e.kind in ("checkpoint_failed", "checkpoint_late") and e.time > since]
    first = s.steps[0].step - 1 if step == 0 else step
    unsaved, every = last.step - max(step, first), s.checkpoint_steps
    late = every is not None and unsaved >= rule.limits["factor"] * every
    if not waits and not late:
        return None
    evidence = {
        "unsaved_steps": unsaved,
        "every_steps": every,
        "saved_step": step,
        "factor": rule.limits["factor"],
    }
    why = (failed + waits)[-1] if failed or waits else None
    detail = f"the latest is of step {step}, {unsaved} steps ago" if step else f"none after {unsaved} steps"
    return _found(s, rule, detail, evidence, event=why)


def _idle_nodes(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    beyond = list(s.spares)[s.wanted_spares :]
    why = {**dict.fromkeys(beyond, "spare beyond cluster.spares"), **s.idle}
    if not why:
        return None
    listed = {str(n): why[n] for n in sorted(why)[:_MOST_LISTED]}
    evidence = {"by_node": listed, "spares": s.wanted_spares}
    return _found(s, rule, f"{_nodes(sorted(why))}: {why[min(why)]}", evidence, nodes=sorted(why))


def _untested_nodes(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    if not s.untested:
        return None
    nodes = sorted(s.untested)
    evidence = {"with_ranks": [n for n in nodes if n in s.training]}
    return _found(s, rule, f"{_nodes(nodes)} came back", evidence, nodes=nodes)


def _spares_exhausted(s: Situation, rule: Rule, held: Alert | None) -> ConditionMatch | None:
    if not s.wanted_spares or not s.training or s.spares:
        return None
    evidence = {
        "spares": 0,
        "wanted": s.wanted_spares,
        "nodes": len(s.training),
        "wanted_nodes": s.wanted_nodes,
    }
    detail = f"{len(s.training)} of {s.wanted_nodes} nodes train, 0 of {s.wanted_spares} spares wait"
    return _found(s, rule, detail, evidence)


# -- message texts


def _nodes(nodes: Sequence[int]) -> str:
    """Nodes as text, with ranges: "nodes 0-63"."""
    ranges: list[list[int]] = []
    for node in nodes:
        if ranges and ranges[-1][1] == node - 1:
            ranges[-1][1] = node
        else:
            ranges.append([node, node])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    more = "" if len(ranges) <= 8 else " and more"
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(shown)}{more}"


def _found(
    s: Situation,
    rule: Rule,
    detail: str,
    evidence: Mapping[str, Any],
    *,
    nodes: Sequence[int] = (),
    rank: int | None = None,
    event: Event | None = None,
) -> ConditionMatch:
    """A match with the rule's texts. `event`: the run's own event, if it recorded one."""
    if event is not None:
        seen = {"kind": event.kind, "time": event.time, "message": event.message}
        own = (event.data or {}).get("evidence")
        evidence = {**evidence, "event": {**seen, "evidence": own} if own else seen}
    command = rule.command if nodes else rule.command.removesuffix(" --node {node}")
    where = {"run": shlex.quote(s.run), "job": shlex.quote(s.job), "node": nodes[0] if nodes else ""}
    return ConditionMatch(
        f"{rule.summary}: {detail}", evidence, list(nodes), rank, command.format_map(where) or None
    )


CONDITIONS: Mapping[str, Condition] = {
    "nonfinite": _of_kind("nonfinite"),
    "loss_spike": _of_kind("loss_spike"),
    "corruption": _of_kind("corruption"),
    "gradient_drift": _gradient_drift,
    "throughput_drop": _throughput_drop,
    "straggler": _of_kind("straggler"),
    "no_progress": _no_progress,
    "gpu_hot": _gpu_hot,
    "gpu_throttled": _gpu_throttled,
    "link_errors": _link_errors,
    "congestion": _congestion,
    "storage_full": _storage_full,
    "checkpoint_overdue": _checkpoint_overdue,
    "idle_nodes": _idle_nodes,
    "untested_nodes": _untested_nodes,
    "spares_exhausted": _spares_exhausted,
}
