"""State or outcome of a run, as text and as JSON, from its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from seatrial.base import units
from seatrial.base.batches import BatchSizes
from seatrial.record.alerting import open_alerts
from seatrial.record.events import Event
from seatrial.record.failure import Failure
from seatrial.record.jsonl import plain
from seatrial.record.nodes import Nodes
from seatrial.record.view import RunView
from seatrial.ui import figures
from seatrial.ui.goodput_words import goodput_of, goodput_pairs
from seatrial.ui.out import Out, Pair
from seatrial.ui.recovery import Recoveries, message_of
from seatrial.ui.step_split import account_of, split_pairs, waterfall_of_run, waterfall_pairs

SCHEMA_VERSION = 1
TRACEBACK_LINES = 15
LAST_EVENTS = 8

# Occur at least once per node, and `nodes` shows the same.
_NOT_SHOWN = ("agent_started", "node_joined")

STATE_STYLES = {"finished": "bold green", "failed": "bold red", "running": "bold blue"}


def print_summary(out: Out, view: RunView, next_commands: Sequence[str]) -> None:
    """Print the outcome of a run: results, files, and suggested commands."""
    total = view.job.steps
    steps = f"step {view.step:,}" + (f" of {total:,}" if total else "") if view.step else "no step completed"
    if view.skipped_steps:
        steps += f", {len(view.skipped_steps):,} skipped"
    wall = view.wall_time_s(time.time())
    took = "" if wall is None else f", after {units.duration(wall)}"
    out.line()
    out.line(
        f"{view.folder.path.name} {view.state}: {steps}{took}", STATE_STYLES.get(view.state, "bold yellow")
    )
    split = account_of(view)
    progress = [*_progress_pairs(view), *split_pairs(split), *waterfall_pairs(*waterfall_of_run(view, split))]
    ended = [*goodput_pairs(view, time.time()), *recovery_pairs(view)]
    out.pairs([Pair("why", view.state_reason), *progress, *ended])
    if view.failure is not None:
        _print_failure(out, view.failure)
    _print_places(out, view)
    sample = view.sample
    if sample is not None and view.state == "finished":
        out.boxed("sample", str(sample.get("prompt", "")), str(sample.get("text", "")))
    for i, command in enumerate(next_commands):
        out.pair("next" if i == 0 else "", command, "bold")


def print_status(out: Out, view: RunView, now: float) -> None:
    """Print the run's state at `now` (unix seconds), for `watch --once`."""
    print_headline(out, view)
    out.pair("why", view.state_reason)
    last, total = view.last, view.job.steps
    if not view.step:
        out.pair("step", f"none of {total:,} done" if total else "none done")
    else:
        parts = [
            f"{view.step:,}"
            if total is None
            else f"{view.step:,} of {total:,} ({100 * view.step / total:.0f} %)"
        ]
        if view.state == "running":
            parts.append(f"ETA {figures.eta(view.eta_s)}")
        if last is not None:
            parts.append(f"last one {_ago(now - last.time)}")
        out.pair("step", ", ".join(parts))
    out.pairs(
        [
            *alert_pairs(view),
            *_progress_pairs(view),
            *goodput_pairs(view, now),
            *recovery_pairs(view, now),
        ]
    )
    if view.failure is not None:
        _print_failure(out, view.failure)
    out.pairs([*node_pairs(view), *checkpoint_pairs(view, now), *ledger_pairs(view)])
    out.pair("folder", str(view.folder.path))
    print_events(out, view)


def alert_pairs(view: RunView) -> list[Pair]:
    """Firing alerts of a running run, each with the suggested command."""
    if view.state != "running":
        return []
    return [
        Pair(
            "alert",
            alert.message + (f": {alert.command}" if alert.command else ""),
            "bold red" if alert.severity == "error" else "yellow",
        )
        for alert in open_alerts(view.own_events)
    ]


def live_pairs(view: RunView, now: float) -> list[Pair]:
    """The live lines besides the last step's figures, most important first."""
    return [
        *alert_pairs(view),
        *loss_pairs(view),
        *validation_pairs(view),
        *_experts_pairs(view),
        *_extra_pairs(view),
        *recovery_pairs(view),
        *node_pairs(view),
        *checkpoint_pairs(view, now),
        *ledger_pairs(view),
    ]


def print_headline(out: Out, view: RunView) -> None:
    """Print name, state and generation."""
    who = f" by process {view.pid}" if view.pid is not None else ""
    generation = f", generation {view.generation}" if view.generation else ""
    out.line(
        f"{view.folder.path.name}: {view.state}{who}{generation}", STATE_STYLES.get(view.state, "bold yellow")
    )


def print_events(out: Out, view: RunView) -> None:
    """Print the last events, one per line."""
    events = shown_events(view)[-LAST_EVENTS:]
    if events:
        out.line("  last events")
    for event in events:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
        mark = "" if event.severity == "info" else f"{event.severity}: "
        style = {"error": "red", "warning": "yellow"}.get(event.severity, "")
        out.line(f"    {when}  {event.kind:<18}  {mark}{message_of(event)}", style)


def shown_events(view: RunView) -> list[Event]:
    """The events to show."""
    return [e for e in view.events if e.kind not in _NOT_SHOWN]


def ledger_pairs(view: RunView) -> list[Pair]:
    """Whether every sample was seen exactly once, and which steps were skipped."""
    left_out = view.skipped_steps
    detail = f"{view.ledger_steps:,} step{'' if view.ledger_steps == 1 else 's'}"
    if view.ledger_gaps:
        more = len(view.ledger_gaps) - 3
        text = "\n".join(view.ledger_gaps[:3] + ([f"and {more} more"] if more > 0 else []))
    elif not view.ledger_steps:
        text = "empty"
    elif view.job.batches is None:
        text = "unknown: job.toml has no global batch"
    elif left_out:
        text = f"{detail}, {len(left_out):,} of them skipped; every sample of the others seen once"
    else:
        text = f"{detail}, every sample seen once"
    pairs = [Pair("ledger", text, "bold red" if view.ledger_gaps else "")]
    return [*pairs, left_out_pair(left_out, view.job.batches)] if left_out else pairs


def left_out_pair(steps: Sequence[int], batches: BatchSizes | None) -> Pair:
    """The steps whose samples were skipped on purpose."""
    samples = "" if batches is None else f" ({sum(map(batches.size, steps)):,} samples)"
    return Pair("skipped", f"{figures.steps(steps)}{samples}", "yellow")


def summary_json(view: RunView, now: float, next_commands: Sequence[str] = ()) -> str:
    """One JSON document with a final newline. Non-finite figures are the strings "NaN", "Infinity", "-Infinity"."""
    first, last, failure, latest = view.first, view.last, view.failure, view.latest
    recoveries, nodes = Recoveries(view.own_events), Nodes(view.own_events)
    split = account_of(view)
    waterfall, why_not_predicted = waterfall_of_run(view, split)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": view.folder.path.name,
        "folder": str(view.folder.path),
        "state": view.state,
        "state_reason": view.state_reason,
        "pid": view.pid,
        "generation": view.generation,
        "device": view.device,
        "step": view.step,
        "steps": view.job.steps,
        "loss_first": first.loss if first else None,
        "loss_last": last.loss if last else None,
        "validation": _validation(view),
        "grad_norm": last.grad_norm if last else None,
        "lr": last.lr if last else None,
        "router_aux_loss": last.router_aux_loss if last else None,
        "expert_load_max": last.expert_load_max if last else None,
        "expert_load_min": last.expert_load_min if last else None,
        "idle_experts": last.idle_experts if last else None,
        "extra": last.extra if last else None,
        "tokens": view.tokens,
        "tokens_per_s": last.tokens_per_s if last else None,
        "tokens_per_s_per_gpu": last.tokens_per_s_per_gpu if last else None,
        "tokens_per_s_median": _median(view, "tokens_per_s"),
        "tokens_per_s_per_gpu_median": _median(view, "tokens_per_s_per_gpu"),
        "step_time_s_median": _median(view, "step_time_s"),
        "step_split": split.as_dict() if split is not None else None,
        "waterfall": waterfall.as_dict() | {"why_not_predicted": why_not_predicted or None}
        if waterfall
        else None,
        "mfu": last.mfu if last else None,
        "memory_bytes": last.memory_bytes if last else None,
        "last_step_time": last.time if last else None,
        "wall_time_s": view.wall_time_s(now),
        "goodput": goodput_of(view, now).as_dict() if view.last is not None else None,
        "eta_s": view.eta_s if view.state == "running" else None,
        "checkpoint": latest and {"step": latest.step, "path": latest.where, "age_s": now - latest.time},
        "checkpoint_steps": [c.step for c in view.checkpoints],
        "ledger": {
            "steps": view.ledger_steps,
            "verdict": _ledger_text(view),
            "gaps": view.ledger_gaps,
            "skipped_steps": view.skipped_steps,
            "skipped_samples": view.skipped_samples,
        },
        "nodes": {
            "training": nodes.training,
            "spares": nodes.spares,
            "gone": [{"node": node, "how": how} for node, how in sorted(nodes.gone.items())],
        },
        "recoveries": {
            "count": len(recoveries.seconds),
            "seconds": recoveries.seconds,
            "steps_done_again": recoveries.redone,
            "underway": recoveries.underway(now) if view.state == "running" else None,
        },
        "alerts": [vars(a) for a in open_alerts(view.own_events)] if view.state == "running" else [],
        "failure": failure
        and {
            "cause": failure.cause,
            "node": failure.node,
            "rank": failure.rank,
            "traceback": failure.tail or None,
            "log": failure.log or None,
            "hint": failure.hint or None,
        },
        "sample": view.sample,
        "events": [vars(e) for e in view.events[-LAST_EVENTS:]],
        "problems": [vars(p) for p in view.problems],
        "next_commands": list(next_commands),
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _progress_pairs(view: RunView) -> list[Pair]:
    last, unit = view.last, figures.unit(view.device)
    if last is None:
        return []
    speed, each = _median(view, "tokens_per_s"), _median(view, "tokens_per_s_per_gpu")
    return [
        *loss_pairs(view),
        *validation_pairs(view),
        Pair("grad norm", f"{last.grad_norm:.2f}"),
        *_experts_pairs(view),
        *_extra_pairs(view),
        Pair("tokens", units.count(view.tokens)),
        Pair(
            "speed",
            f"{figures.rate(speed)} tokens/s (median), {figures.rate(each)} a {unit}, MFU {figures.mfu(last.mfu)}",
        ),
        Pair("memory", f"{figures.memory(last.memory_bytes)} (highest of any {unit})"),
    ]


def loss_pairs(view: RunView) -> list[Pair]:
    """The loss of the first and the last step, with a sparkline."""
    if view.first is None or view.last is None:
        return []
    bars = figures.spark(view.history.column("loss"))
    return [Pair("loss", f"{view.first.loss:.4f} -> {view.last.loss:.4f}" + (f"  {bars}" if bars else ""))]


def validation_pairs(view: RunView) -> list[Pair]:
    """The last and the best validation loss."""
    found = _validation(view)
    if found is None:
        return []
    best = (
        "the best"
        if found["best_step"] == found["step"]
        else f"best {found['best_loss']:.4f} after step {found['best_step']:,}"
    )
    return [Pair("validation", f"loss {found['loss']:.4f} after step {found['step']:,}, {best}")]


def _validation(view: RunView) -> dict[str, float] | None:
    measured = view.history.validation
    if not measured:
        return None
    best_step, best = min(measured, key=lambda m: m[1])
    return {"step": measured[-1][0], "loss": measured[-1][1], "best_step": best_step, "best_loss": best}


def _experts_pairs(view: RunView) -> list[Pair]:
    """The load of the experts in the last step."""
    text = "" if view.last is None else figures.experts(view.last)
    return [Pair("experts", text)] if text else []


def _extra_pairs(view: RunView) -> list[Pair]:
    """The last values of the metrics of other packages."""
    return [Pair("metrics", figures.extra(view.last))] if view.last is not None and view.last.extra else []


def _median(view: RunView, column: str) -> float | None:
    """Median over the last start, or over all starts if it has completed no step yet."""
    values = view.history.column(column, view.first_generation) or view.history.column(column)
    if not values:
        return None
    from seatrial.record.timeline import median  # imports numpy: only for views that need it

    return median(values)


def recovery_pairs(view: RunView, now: float | None = None) -> list[Pair]:
    """The recoveries of the last start; with `now` also one in progress."""
    recoveries = Recoveries(view.own_events)
    pairs = [] if recoveries.total is None else [Pair("recoveries", recoveries.total)]
    underway = recoveries.underway(now) if now is not None and view.state == "running" else None
    return pairs if underway is None else [*pairs, Pair("now", underway, "yellow")]


def node_pairs(view: RunView) -> list[Pair]:
    """The nodes of the run, including missing ones."""
    nodes = Nodes(view.own_events)
    return [] if nodes.text is None else [Pair("nodes", nodes.text, "yellow" if nodes.gone else "")]


def checkpoint_pairs(view: RunView, now: float) -> list[Pair]:
    """The newest checkpoint and its age."""
    if view.latest is None:
        return [Pair("checkpoint", "none yet")]
    kept = f", {len(view.checkpoints)} kept" if len(view.checkpoints) > 1 else ""
    return [Pair("checkpoint", f"step {view.latest.step:,}, {_ago(now - view.latest.time)}{kept}")]


def _print_failure(out: Out, failure: Failure) -> None:
    where = [f"{what} {n}" for what, n in (("node", failure.node), ("rank", failure.rank)) if n is not None]
    if where:
        out.pair("where", ", ".join(where), "bold")
    out.pair("cause", failure.cause, "bold red")
    if failure.tail:
        lines = failure.tail.rstrip().splitlines()
        cut = len(lines) - TRACEBACK_LINES
        shown = ([f"... {cut} earlier lines"] if cut > 0 else []) + lines[-TRACEBACK_LINES:]
        label = "traceback" if "Traceback" in failure.tail else "last lines"
        out.pair(label, "\n".join(shown), "dim")
    if failure.log:
        out.pair("log", failure.log)
    if failure.hint:
        out.pair("hint", failure.hint, "yellow")


def _print_places(out: Out, view: RunView) -> None:
    folder = view.folder
    out.pairs(ledger_pairs(view))
    for problem in view.problems:
        out.pair("damaged", str(problem), "yellow")
    out.pair("folder", f"{folder.path} (job, plan, metrics, events, ledger)")
    if view.latest is None:
        out.pair("checkpoints", "none")
    else:
        place, _, name = view.latest.where.rpartition("/")
        out.pair("checkpoints", f"{place}, newest {name}")
    out.pair("logs", str(folder.rank_log(view.generation, 0, 0).parent.parent))


def _ledger_text(view: RunView) -> str:
    if view.ledger_gaps:
        return "gaps"
    if not view.ledger_steps:
        return "empty"
    return "ok" if view.job.batches else "unjudged"


def _ago(seconds: float) -> str:
    # Another machine's clock may be ahead of ours.
    return f"{figures.eta(max(0.0, seconds))} ago"
