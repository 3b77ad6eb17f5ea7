"""The report of a run as one self-contained HTML file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from seatrial.base import units
from seatrial.base.page import render
from seatrial.record.goodput import LABELS
from seatrial.record.mtbf import Mtbf
from seatrial.record.straggling import Straggling
from seatrial.ui import figures
from seatrial.ui.curve_svg import curve_svg
from seatrial.ui.goodput_svg import goodput_svg
from seatrial.ui.goodput_words import mtbf_words, percent, straggling_words
from seatrial.ui.svg import style, svg_text

_FAILURES, _CHECKPOINTS, _FINDINGS, _ALERTS = 200, 20, 50, 50
_TONES = {"finished": "good", "failed": "bad"}


def page(document: dict[str, Any]) -> str:
    """The page for the document of `report.report`."""
    goodput, loss = document["goodput"], document["loss"]
    return render(
        "watch/report.html",
        picture_style=style(),
        name=document["name"],
        state=document["state"],
        reason=document["state_reason"],
        tone=_TONES.get(document["state"], "warn"),
        where=_subtitle(document),
        big=list(_big(document)),
        bar=_bar(goodput) if goodput else None,
        causes=list(_causes(goodput)) if goodput else [],
        goodput_lines=list(_goodput_lines(goodput)) if goodput else [],
        plan=[_plan_row(row) for row in document["plan"]],
        waterfall=list(_waterfall(document["waterfall"])) if document["waterfall"] else [],
        failures=[_failure(each) for each in document["failures"][-_FAILURES:]],
        failures_more=max(0, len(document["failures"]) - _FAILURES),
        alerts=[_alert(each) for each in document["alerts"][:_ALERTS]],
        alerts_more=max(0, len(document["alerts"]) - _ALERTS),
        curve=_curve(loss) if loss else None,
        checkpoints=list(_checkpoints(document["checkpoints"])),
        scaling=document["scaling"] and _scaling(document["scaling"]),
        checks=document["checks"] and _checks(document["checks"]),
        drills=[_drill(each) for each in document["drills"]],
        cost=list(_cost(document["cost"])) if document["cost"] else [],
        missing=list(document["missing"].items()),
        problems=document["problems"],
    )


def _subtitle(document: dict[str, Any]) -> str:
    layout = document["layout"] or {}
    ranks = f"{layout['world_size']} ranks, " if isinstance(layout.get("world_size"), int) else ""
    parts = [f"{ranks}device {document['device'] or 'unknown'}", document["nodes"] or ""]
    began = f"from {_moment(document['begin'])} to {_moment(document['end'])}" if document["begin"] else ""
    return "; ".join(part for part in (*parts, began, f"report of {_moment(document['time'])}") if part)


def _moment(seconds: float | None) -> str:
    return "unknown" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _big(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    total, goodput, loss, cost = (document[key] for key in ("steps", "goodput", "loss", "cost"))
    yield f"{document['step']:,}" + (f" of {total:,}" if total else ""), "steps"
    yield percent(goodput["ettr"] if goodput else None), "ETTR: share of node time in steps that count"
    yield units.duration(goodput["wall_s"]) if goodput else "none", "wall-clock time"
    yield f"{loss['last']:.4f}" if loss and math.isfinite(loss["last"]) else "unknown", "last loss"
    yield units.count(document["tokens"]), "tokens trained on"
    yield str(sum(f["restarted"] for f in document["failures"])), "failures that stopped ranks"
    yield f"{cost['hours']:,.2f}" if cost else "unknown", f"hours of {cost['of']}" if cost else "GPU hours"
    if cost and cost["price"] is not None:
        yield f"{cost['price']:,.2f}", "cost"


def _bar(goodput: dict[str, Any]) -> str:
    title = f"Where {units.duration(goodput['wall_s'])} went"
    return svg_text(goodput_svg(goodput["seconds"], title=title))


def _causes(goodput: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for cause, seconds in goodput["seconds"].items():
        if seconds > 0:
            share = 100 * seconds / goodput["wall_s"]
            yield cause.replace("_", " "), LABELS[cause], units.duration(seconds), f"{share:.2f} %"


def _goodput_lines(goodput: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "MTBF of the run", mtbf_words(Mtbf(**goodput["mtbf"]))
    yield "MTBF of a node", mtbf_words(Mtbf(**goodput["node_mtbf"]))
    for cls, seconds in sorted(goodput["by_class"].items(), key=lambda each: -each[1]):
        yield f"lost to class {cls}", units.duration(seconds)
    idle = sum(goodput["idle_node_s"].values())
    yield "nodes held without ranks", f"{units.duration(idle)} of node time" if idle else "none"
    if goodput["straggling"]:
        yield "stragglers", straggling_words(Straggling(**goodput["straggling"]))
    for note in goodput["notes"]:
        yield "note", note


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    match unit:
        case "s":
            return units.duration(value)
        case "share":
            return f"{100 * value:.1f} %"
        case "bytes":
            return units.memory(value)
    return f"{value:,.0f}"


def _plan_row(row: dict[str, Any]) -> tuple[str, ...]:
    plan, real = row["predicted"], row["measured"]
    ratio = f"{real / plan:.2f}" if plan and real is not None else ""
    return row["what"], _value(plan, row["unit"]), _value(real, row["unit"]), ratio


def _waterfall(fall: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The measured stages of a step beside the plan's."""
    for row in fall["rows"]:
        if row["seconds"] or row["predicted_s"]:
            measured, predicted = _value(row["seconds"], "s"), _value(row["predicted_s"], "s")
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            yield row["name"], predicted, measured, ratio


def _failure(each: dict[str, Any]) -> tuple[str, ...]:
    place = [f"{what} {each[what]}" for what in ("node", "rank") if each[what] is not None]
    return (
        _moment(each["time"]),
        ", ".join(place) or "-",
        each["cls"],
        each["cause"],
        *(units.duration(each[key]) for key in ("detection_s", "recovery_s", "redone_s", "lost_s")),
    )


def _alert(each: dict[str, Any]) -> tuple[str, ...]:
    nodes = ", ".join(f"node {node}" for node in each["nodes"]) or "the run"
    state = f"{each['state']} {each['severity']}" if each["state"] == "firing" else each["state"]
    return _moment(each["time"]), state, nodes, each["message"], each["command"] or ""


def _curve(loss: dict[str, Any]) -> str | None:
    curves = [("loss", "st-kernels", loss["curve"]), ("validation loss", "st-run", loss["validation"])]
    if not any(points for *_, points in curves):
        return None
    return svg_text(curve_svg(curves, title="Loss (nats/token) by step", name="loss"))


def _checkpoints(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    newest = found["newest"]
    yield (
        "newest",
        f"step {newest['step']:,}, {newest['path']}, {_moment(newest['time'])}" if newest else "none",
    )
    kept = found["kept"]
    yield "kept", figures.steps(kept[-_CHECKPOINTS:]) if kept else "none in the run folder"
    yield "saved", f"{found['saved']:,}; {found['failed']:,} failed, {found['damaged']:,} damaged"
    if found["bytes"] is not None:
        yield "size", units.memory(found["bytes"])
    if found["seconds_median"] is not None:
        yield "time to save", f"{units.duration(found['seconds_median'])} (median)"
    if found["stalled_s_median"] is not None:
        yield "training stalled", f"{units.duration(found['stalled_s_median'])} per save (median, rank 0)"


def _scaling(found: dict[str, Any]) -> dict[str, Any]:
    rows = [
        (
            str(size["nodes"]),
            str(size["gpus"]),
            "unknown" if size["tokens_per_s"] is None else f"{size['tokens_per_s']:,.0f}",
            "" if size["efficiency"] is None else f"{100 * size['efficiency']:.1f} %",
            size["problem"] or "",
        )
        for size in found["sizes"]
    ]
    return {"where": f"{found['scaling']} scaling, {_moment(found['time'])}, {found['file']}", "rows": rows}


def _checks(found: dict[str, Any]) -> dict[str, Any]:
    nodes = [f"{name}: {verdict}" for name, verdict in found["nodes"].items() if verdict != "PASS"]
    passed = len(found["nodes"]) - len(nodes)
    return {
        "verdict": found["verdict"],
        "where": f"{_moment(found['time'])}; {passed} of {len(found['nodes'])} nodes passed",
        "rows": [(f["verdict"], f["code"], f["message"]) for f in found["findings"][:_FINDINGS]],
        "more": max(0, len(found["findings"]) - _FINDINGS),
        "nodes": nodes[:_FINDINGS],
    }


def _drill(found: dict[str, Any]) -> dict[str, Any]:
    rows = [
        (
            str(each["name"]),
            str(each["verdict"]),
            *(
                "-" if each[key] is None else _value(each[key], "s")
                for key in ("detected_in_s", "recovered_in_s")
            ),
            "-" if each["steps_redone"] is None else str(each["steps_redone"]),
        )
        for each in found["scenarios"]
    ]
    return {"file": found["file"], "rows": rows}


def _cost(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield f"hours of {cost['of']}", f"{cost['hours']:,.3f}"
    yield "with ranks", f"{cost['hours_with_ranks']:,.3f}"
    yield "held without ranks", f"{cost['hours_idle']:,.3f}"
    if cost["seconds_per_million_tokens"] is not None:
        yield "per million tokens", f"{cost['seconds_per_million_tokens']:,.1f} s of one"
    if cost["price"] is not None:
        yield "price", f"{cost['price']:,.2f} at {cost['price_per_hour']:g} per hour"
