"""How a run stands or ended, as text and as JSON, from its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from seatrial.base import units
from seatrial.record.jsonl import plain
from seatrial.record.view import Failure, RunView, eta_s
from seatrial.ui import figures
from seatrial.ui.out import Out
from seatrial.ui.recovery import Recoveries

SCHEMA_VERSION = 1
TRACEBACK_LINES = 15
LAST_EVENTS = 8

STATE_STYLES = {"finished": "bold green", "failed": "bold red", "running": "bold blue"}


def print_summary(out: Out, view: RunView, next_commands: Sequence[str]) -> None:
    """The end of a run: what came out of it, where everything is, and what to do next."""
    total = view.job.steps
    last = view.last
    steps = (
        "no step was done" if last is None else f"step {last.step:,}" + (f" of {total:,}" if total else "")
    )
    wall = view.wall_time_s(time.time())
    took = "" if wall is None else f", after {units.duration(wall)}"
    out.line()
    out.line(
        f"{view.folder.path.name} {view.state}: {steps}{took}", STATE_STYLES.get(view.state, "bold yellow")
    )
    if view.state == "preempted":
        out.pair("why", view.state_reason)
    for label, text in _progress_pairs(view):
        out.pair(label, text)
    _print_recoveries(out, view)
    if view.failure is not None:
        _print_failure(out, view.failure)
    _print_places(out, view)
    sample = view.sample
    if sample is not None and view.state == "finished":
        out.boxed("sample", str(sample.get("prompt", "")), str(sample.get("text", "")))
    for i, command in enumerate(next_commands):
        out.pair("next" if i == 0 else "", command, "bold")


def print_status(out: Out, view: RunView, now: float) -> None:
    """The run as it stands at `now` (unix seconds), for `watch --once`."""
    who = f" by process {view.pid}" if view.state == "running" and view.pid is not None else ""
    generation = f", generation {view.generation}" if view.generation else ""
    out.line(
        f"{view.folder.path.name}: {view.state}{who}{generation}", STATE_STYLES.get(view.state, "bold yellow")
    )
    if view.state in ("stopped", "preempted", "not started"):
        out.pair("why", view.state_reason)
    last, total = view.last, view.job.steps
    if last is None:
        out.pair("step", f"none of {total:,} done" if total else "none done")
    else:
        parts = [
            f"{last.step:,}"
            if total is None
            else f"{last.step:,} of {total:,} ({100 * last.step / total:.0f} %)"
        ]
        if view.state == "running":
            parts.append(f"ETA {figures.eta(_eta(view))}")
        parts.append(f"last one {_ago(now - last.time)}")
        out.pair("step", ", ".join(parts))
    for label, text in _progress_pairs(view):
        out.pair(label, text)
    _print_recoveries(out, view, now)
    if view.failure is not None:
        _print_failure(out, view.failure)
    if view.latest is None:
        out.pair("checkpoint", "none yet")
    else:
        kept = f", {len(view.checkpoints)} kept" if len(view.checkpoints) > 1 else ""
        out.pair("checkpoint", f"step {view.latest.step:,}, {_ago(now - view.latest.time)}{kept}")
    out.pair("ledger", ledger_verdict(view))
    out.pair("folder", str(view.folder.path))
    events = view.events[-LAST_EVENTS:]
    if events:
        out.line("  last events")
    for event in events:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
        mark = "" if event.severity == "info" else f"{event.severity}: "
        style = {"error": "red", "warning": "yellow"}.get(event.severity, "")
        out.line(f"    {when}  {event.kind:<18}  {mark}{event.message}", style)


def ledger_verdict(view: RunView) -> str:
    """Whether every sample was seen exactly once so far."""
    if view.ledger_gaps:
        more = len(view.ledger_gaps) - 3
        return "\n".join(view.ledger_gaps[:3] + ([f"and {more} more"] if more > 0 else []))
    if not view.ledger_steps:
        return "empty"
    if view.job.global_batch is None:
        return "unjudged: job.toml does not tell the global batch"
    return f"{view.ledger_steps:,} steps, every sample seen once"


def summary_json(view: RunView, now: float, next_commands: Sequence[str] = ()) -> str:
    """One JSON document with a final newline. Non-finite figures are the strings "NaN", "Infinity", "-Infinity"."""
    first, last, failure, latest = view.first, view.last, view.failure, view.latest
    own, recoveries = view.of_start(), _recoveries(view)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": view.folder.path.name,
        "folder": str(view.folder.path),
        "state": view.state,
        "state_reason": view.state_reason,
        "pid": view.pid,
        "generation": view.generation,
        "step": last.step if last else 0,
        "steps": view.job.steps,
        "loss_first": first.loss if first else None,
        "loss_last": last.loss if last else None,
        "grad_norm": last.grad_norm if last else None,
        "lr": last.lr if last else None,
        "tokens": last.tokens if last else 0,
        "tokens_per_s": last.tokens_per_s if last else None,
        "tokens_per_s_per_gpu": last.tokens_per_s_per_gpu if last else None,
        "tokens_per_s_median": median(m.tokens_per_s for m in own) if own else None,
        "tokens_per_s_per_gpu_median": median(m.tokens_per_s_per_gpu for m in own) if own else None,
        "step_time_s_median": median(m.step_time_s for m in own) if own else None,
        "mfu": last.mfu if last else None,
        "memory_bytes": last.memory_bytes if last else None,
        "last_step_time": last.time if last else None,
        "wall_time_s": view.wall_time_s(now),
        "eta_s": _eta(view) if view.state == "running" else None,
        "checkpoint": latest and {"step": latest.step, "path": latest.where, "age_s": now - latest.time},
        "checkpoint_steps": [c.step for c in view.checkpoints],
        "ledger": {
            "steps": view.ledger_steps,
            "verdict": _ledger_word(view),
            "gaps": view.ledger_gaps,
        },
        "recoveries": {
            "count": len(recoveries.seconds),
            "seconds": recoveries.seconds,
            "steps_done_again": recoveries.redone,
            "underway": recoveries.underway(now) if view.state == "running" else None,
        },
        "failure": failure
        and {
            "cause": failure.cause,
            "node": failure.node,
            "rank": failure.rank,
            "traceback": failure.traceback,
            "log": str(failure.log) if failure.log else None,
            "hint": failure.hint,
        },
        "sample": view.sample,
        "events": [vars(e) for e in view.events[-LAST_EVENTS:]],
        "problems": [vars(p) for p in view.problems],
        "next_commands": list(next_commands),
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _progress_pairs(view: RunView) -> list[tuple[str, str]]:
    first, last = view.first, view.last
    if first is None or last is None:
        return []
    own = view.of_start() or view.metrics
    bars = figures.spark([m.loss for m in view.metrics])
    return [
        ("loss", f"{first.loss:.4f} -> {last.loss:.4f}" + (f"  {bars}" if bars else "")),
        ("grad norm", f"{last.grad_norm:.2f}"),
        ("tokens", units.count(last.tokens)),
        (
            "speed",
            f"{figures.rate(median(m.tokens_per_s for m in own))} tokens/s (median), "
            f"{figures.rate(median(m.tokens_per_s_per_gpu for m in own))} a GPU, MFU {figures.mfu(last.mfu)}",
        ),
        ("memory", figures.memory(last.memory_bytes)),
    ]


def _recoveries(view: RunView) -> Recoveries:
    """Those of the last start."""
    return Recoveries(e for e in view.events if e.generation >= view.first_generation)


def _print_recoveries(out: Out, view: RunView, now: float | None = None) -> None:
    recoveries = _recoveries(view)
    if recoveries.total is not None:
        out.pair("recoveries", recoveries.total)
    underway = recoveries.underway(now) if now is not None and view.state == "running" else None
    if underway is not None:
        out.pair("now", underway, "yellow")


def _print_failure(out: Out, failure: Failure) -> None:
    where = [f"{what} {n}" for what, n in (("node", failure.node), ("rank", failure.rank)) if n is not None]
    if where:
        out.pair("where", ", ".join(where), "bold")
    out.pair("cause", failure.cause, "bold red")
    if failure.traceback:
        lines = failure.traceback.rstrip().splitlines()
        cut = len(lines) - TRACEBACK_LINES
        shown = ([f"... {cut} lines before"] if cut > 0 else []) + lines[-TRACEBACK_LINES:]
        label = "traceback" if "Traceback" in failure.traceback else "last lines"
        out.pair(label, "\n".join(shown), "dim")
    if failure.log is not None:
        out.pair("log", str(failure.log))
    if failure.hint:
        out.pair("hint", failure.hint, "yellow")


def _print_places(out: Out, view: RunView) -> None:
    folder = view.folder
    out.pair("ledger", ledger_verdict(view), "bold red" if view.ledger_gaps else "")
    for problem in view.problems:
        out.pair("damaged", str(problem), "yellow")
    out.pair("folder", f"{folder.path} (job, plan, metrics, events, ledger)")
    if view.latest is None:
        out.pair("checkpoints", "none")
    else:
        place, _, name = view.latest.where.rpartition("/")
        out.pair("checkpoints", f"{place}, newest {name}")
    out.pair("logs", str(folder.rank_log(view.generation, 0, 0).parent.parent))


def _ledger_word(view: RunView) -> str:
    if view.ledger_gaps:
        return "gaps"
    if not view.ledger_steps:
        return "empty"
    return "ok" if view.job.global_batch else "unjudged"


def _eta(view: RunView) -> float | None:
    if view.last is None or view.job.steps is None:
        return None
    return eta_s([m.step_time_s for m in view.of_start()], view.job.steps - view.last.step)


def _ago(seconds: float) -> str:
    # A clock of another machine may be ahead of ours.
    return f"{figures.eta(max(0.0, seconds))} ago"
