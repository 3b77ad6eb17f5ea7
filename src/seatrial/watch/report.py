"""The report of a run from its folder: plan against measurement, where the time went, and what is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from seatrial import __version__
from seatrial.base.files import parse_toml, read_json, read_text
from seatrial.record.alerting import last_alerts
from seatrial.record.goodput import Goodput
from seatrial.record.nodes import Nodes
from seatrial.record.view import RunView
from seatrial.ui import figures
from seatrial.ui.goodput_words import goodput_of
from seatrial.ui.step_split import account_of, prediction_of, waterfall_of_run

SCHEMA_VERSION = 1
_POINTS = 600  # of a curve
_DRILLS = 20


def report(view: RunView, now: float, price: float | None = None) -> dict[str, Any]:
    """The report as JSON. `price`: per GPU hour. `missing` lists what is unknown, with reasons."""
    found = goodput_of(view, now, sample=True)
    missing: dict[str, str] = {}
    split = account_of(view)
    waterfall, why = waterfall_of_run(view, split)
    return {
        "schema_version": SCHEMA_VERSION,
        "seatrial": __version__,
        "time": now,
        "name": view.folder.path.resolve().name,
        "folder": str(view.folder.path),
        "state": view.state,
        "state_reason": view.state_reason,
        "device": view.device,
        "step": view.step,
        "steps": view.job.steps,
        "tokens": view.tokens,
        "begin": found.begin if found.wall_s else None,
        "end": found.end if found.wall_s else None,
        "layout": _plan_value(view, "layout", missing),
        "parameters": _plan_value(view, "parameters", {}),
        "plan": _plan(view, split.ranks if split is not None else None, missing),
        "waterfall": _or_missing(
            missing, "waterfall", waterfall and waterfall.as_dict(), why or "no stages recorded"
        ),
        "goodput": _or_missing(
            missing, "goodput", found.as_dict() if found.wall_s else None, "nothing has run yet"
        ),
        "failures": [vars(each) | {"lost_s": each.lost_s} for each in found.interruptions],
        "checkpoints": _checkpoints(view),
        "loss": _loss(view, missing),
        "scaling": _scaling(view, missing),
        "checks": _checks(view, missing),
        "drills": _drills(view, missing),
        "cost": _cost(view, found, price, missing),
        "nodes": Nodes(view.own_events).text,
        "alerts": _alerts(view),
        "problems": [str(problem) for problem in view.problems],
        "missing": missing,
    }


def _or_missing(missing: dict[str, str], part: str, value: Any, why: str) -> Any:
    if value is None:
        missing[part] = why
    return value


def _plan_value(view: RunView, key: str, missing: dict[str, str]) -> Any:
    try:
        return read_json(view.folder.plan_json)[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing["layout"] = f"plan.json cannot be used: {_reason(error)}"
        return None


def _plan(view: RunView, ranks: int | None, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of `what`, `predicted`, `measured`, `unit`; without rows that have neither value."""
    predicted, why = prediction_of(view, ranks)
    if predicted is None:
        missing["prediction"] = why
    last, start = view.last, view.first_generation
    # A prediction is of steps with the whole batch: there is none while it grows.
    first = 0 if predicted is None or view.job.batches is None else view.job.batches.ramp + 1
    seconds = view.history.column("step_time_s", start, first)
    rates = view.history.column("tokens_per_s_per_gpu", start, first)
    rows = [
        ("steps", "", view.job.steps, view.step or None),
        ("step time", "s", predicted and predicted.step_s, median(seconds) if seconds else None),
        (
            f"tokens/s per {figures.unit(view.device)}",
            "",
            predicted and predicted.tokens_per_s_per_gpu,
            median(rates) if rates else None,
        ),
        ("MFU", "share", predicted and predicted.mfu, last.mfu if last else None),
        ("memory", "bytes", predicted and predicted.memory.reserved, last.memory_bytes if last else None),
    ]
    return [
        {"what": what, "unit": unit, "predicted": plan, "measured": real}
        for what, unit, plan, real in rows
        if plan is not None or real is not None
    ]


def _checkpoints(view: RunView) -> dict[str, Any]:
    saved = [e.data or {} for e in view.events if e.kind == "checkpoint_saved"]
    return {
        "saved": len(saved),
        "failed": sum(e.kind == "checkpoint_failed" and e.severity == "error" for e in view.events),
        "damaged": sum(e.kind == "checkpoint_damaged" for e in view.events),
        "kept": [c.step for c in view.checkpoints],
        "newest": view.latest
        and {"step": view.latest.step, "path": view.latest.where, "time": view.latest.time},
        "bytes": _number(saved[-1].get("bytes")) if saved else None,
        "seconds_median": _median(saved, "seconds"),
        "stalled_s_median": _median(saved, "stalled_s"),
    }


def _median(values: Sequence[dict[str, Any]], key: str) -> float | None:
    numbers = [n for each in values if (n := _number(each.get(key))) is not None]
    return median(numbers) if numbers else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _loss(view: RunView, missing: dict[str, str]) -> dict[str, Any] | None:
    if view.last is None or view.first is None:
        missing["loss"] = "no step has finished"
        return None
    steps, loss = view.history.steps, view.history.column("loss")
    validation = view.history.validation
    if not validation:
        missing["validation loss"] = "not measured (train.validate_every_steps)"
    return {
        "first": view.first.loss,
        "last": view.last.loss,
        "curve": _thinned(
            [(step, value) for step, value in zip(steps, loss, strict=True) if math.isfinite(value)]
        ),
        "validation": _thinned(validation),
        "skipped_steps": view.skipped_steps,
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most _POINTS points: the mean of each bin of steps, at its last step."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-len(points) // _POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _scaling(view: RunView, missing: dict[str, str]) -> dict[str, Any] | None:
    """The latest scaling report of a job with this name, in the folder of the run."""
    name = view.folder.path.resolve().name
    newest = _newest(
        view.folder.path.resolve().parent / ".scale", f"{name}-*/report.json", lambda d: d["job"] == name
    )
    if newest is None:
        missing["scaling"] = f"no `seatrial scale` of {name} in {view.folder.path.parent}/.scale"
        return None
    path, document = newest
    try:
        sizes = [
            {
                "nodes": size["nodes"],
                "gpus": size["gpus"],
                "tokens_per_s": (size["tokens_per_s"] or {}).get("mean"),
                "efficiency": (size["efficiency"] or {}).get("mean"),
                "problem": size["problem"],
            }
            for size in document["sizes"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        missing["scaling"] = f"{path} cannot be used: {_reason(error)}"
        return None
    return {
        "file": str(path),
        "time": document.get("time"),
        "scaling": document.get("scaling"),
        "sizes": sizes,
    }


def _newest(
    root: Path, pattern: str, fits: Callable[[dict[str, Any]], bool]
) -> tuple[Path, dict[str, Any]] | None:
    for path in sorted(root.glob(pattern), reverse=True):  # names end with a timestamp
        try:
            document = read_json(path)
            if fits(document):
                return path, document
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _checks(view: RunView, missing: dict[str, str]) -> dict[str, Any] | None:
    path = view.folder.reports / "check.json"
    try:
        document = read_json(path)
        return {
            "verdict": document["verdict"],
            "time": document.get("time"),
            "nodes": dict(document["nodes"]),
            "findings": [
                {"code": f["code"], "verdict": f["verdict"], "message": f["message"]}
                for f in document["findings"]
                if f["verdict"] != "PASS"
            ],
        }
    except FileNotFoundError:
        missing["checks"] = "no `seatrial check JOB` wrote reports/check.json"
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing["checks"] = f"{path.name} cannot be used: {_reason(error)}"
    return None


def _drills(view: RunView, missing: dict[str, str]) -> list[dict[str, Any]]:
    found = []
    for path in sorted(view.folder.reports.glob("drill-*.json"), reverse=True)[:_DRILLS]:
        try:
            scenarios = [
                {
                    key: each.get(key)
                    for key in ("name", "verdict", "detected_in_s", "recovered_in_s", "steps_redone")
                }
                for each in read_json(path)["scenarios"]
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            missing["drills"] = f"{path.name} cannot be used: {_reason(error)}"
            continue
        found.append({"file": path.name, "scenarios": scenarios})
    if not found:
        missing.setdefault("drills", "no `seatrial drill` of this run wrote reports/drill-TIME.json")
    return found


def _cost(
    view: RunView, found: Goodput, price: float | None, missing: dict[str, str]
) -> dict[str, Any] | None:
    """GPU hours (rank hours on CPUs) of held nodes, with and without ranks."""
    try:
        each = parse_toml(read_text(view.folder.job_toml))["cluster"]["gpus_per_node"]
        if type(each) is not int or each < 1:
            raise ValueError("cluster.gpus_per_node is not a number of GPUs")
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing["cost"] = f"job.toml cannot be used: {_reason(error)}"
        return None
    busy = found.node_mtbf.exposure_s * each / 3600
    idle = math.fsum(found.idle_node_s.values()) * each / 3600
    if price is None:
        missing["price"] = "the price of a GPU hour is unknown: give --price"
    tokens = view.tokens
    return {
        "of": "ranks on CPUs" if view.device == "cpu" else "GPUs",
        "hours": busy + idle,
        "hours_with_ranks": busy,
        "hours_idle": idle,
        "seconds_per_million_tokens": (busy + idle) * 3600 / tokens * 1e6 if tokens else None,
        "price_per_hour": price,
        "price": None if price is None else (busy + idle) * price,
    }


def _alerts(view: RunView) -> list[dict[str, Any]]:
    """The latest state of each alert, firing ones first."""
    return [
        vars(each) for each in sorted(last_alerts(view.events), key=lambda a: (a.state != "firing", -a.time))
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"no {error}" if isinstance(error, KeyError) else str(error)
