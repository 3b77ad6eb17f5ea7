"""Comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from seatrial.base import units
from seatrial.base.files import flat, parse_toml, read_text
from seatrial.record.folder import RunFolder
from seatrial.record.view import RunView
from seatrial.ui import figures
from seatrial.watch.web import blocks as b
from seatrial.watch.web.polled_run import PolledRun

_POINTS = 600
MOST = 8  # runs in one comparison


def column(polled: PolledRun) -> dict[str, Any]:
    """The data of one run for a comparison."""
    view, last = polled.view, polled.view.last
    recent = view.history.column("step_time_s")[-200:]
    return {
        "facts": [
            ("state", view.state),
            ("step", figures.step_of(view.step, view.job.steps).strip()),
            ("tokens", units.count(view.tokens) if view.tokens else None),
            ("loss", None if last is None else f"{last.loss:.4f}"),
            ("tokens/s", None if last is None else figures.rate(last.tokens_per_s)),
            ("MFU", None if last is None else figures.mfu(last.mfu)),
            ("median of the last 200 step times", units.duration(median(recent)) if len(recent) else None),
            ("generations", view.generation),
            ("checkpoint", None if view.latest is None else f"step {view.latest.step:,}"),
        ],
        "loss": _curve(view),
        "job": _job(view.folder),
    }


def comparison(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The page. `columns`: run name -> its `column`."""
    names = list(columns)
    labels = [label for label, _ in next(iter(columns.values()))["facts"]] if columns else []
    rows = [[label, *(dict(c["facts"]).get(label) for c in columns.values())] for label in labels]
    found = [b.table("Runs", ["", *(f"#{name}" for name in names)], rows)]
    steps = sorted({step for c in columns.values() for step in c["loss"]})
    if steps:
        series = [(name, [c["loss"].get(step) for step in steps]) for name, c in columns.items()]
        found.append(b.chart("Loss", steps, series, unit="nats/token", gaps=False))
    jobs = {name: c["job"] for name, c in columns.items()}
    missing = [f"{name}: job.toml cannot be read" for name, job in jobs.items() if job is None]
    known = {name: job or {} for name, job in jobs.items()}
    keys = sorted({key for job in known.values() for key in job})
    differ = [
        k for k in keys if len({str(job.get(k)) for name, job in known.items() if jobs[name] is not None}) > 1
    ]
    if differ:
        rows = [[key, *(_text(known[name].get(key)) for name in names)] for key in differ[:200]]
        found.append(b.table("Differences between the job files", ["key", *names], rows))
    return {"title": "Compare", "blocks": found, "missing": missing}


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:200]


def _curve(view: RunView) -> dict[int, float]:
    steps, loss = view.history.steps, view.history.column("loss")
    places: Sequence[int] = (
        np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _POINTS)).astype(int)).tolist()
        if steps
        else []
    )
    return {steps[i]: float(f"{loss[i]:.6g}") for i in places if np.isfinite(loss[i])}


def _job(folder: RunFolder) -> dict[str, Any] | None:
    try:
        return flat(parse_toml(read_text(folder.job_toml, most=1 << 20)))
    except (OSError, ValueError):
        return None
