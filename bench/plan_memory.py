"""Predicted memory compared with published figures, and the verdicts for layouts that ran and that ran out of memory.

The three verdicts (plan/cost/memory_fit.py) are derived from the errors themselves. When a row is scored, the errors of its own source are
left out, so that a source does not set the limit that it is judged by.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import Any

from plan_rows import Guessed, Row
from seatrial.plan.cost.memory import Memory, memory
from seatrial.plan.cost.memory_fit import SURE, Errors, Tail, judge, shipped_errors
from seatrial.plan.cost.predict import capacity
from seatrial.plan.cost.stacks import stacks


def held(row: Row) -> Memory:
    return memory(row.model, row.recipe, stacks()[row.stack])


def fits(row: Row) -> bool:
    return held(row).reserved <= capacity(row.cluster)


def told(rows: Iterable[Row]) -> list[Row]:
    """Rows that state everything that memory depends on."""
    return [r for r in rows if not (r.free_microbatch or r.free_recompute)]


def ratio(row: Row) -> float | None:
    """Measured over predicted memory of the same kind; None if not measured."""
    if row.memory_bytes is None or not row.fits:
        return None
    of = held(row)
    predicted = {"allocated": of.allocated, "reserved": of.held, "device": of.reserved}[row.memory_kind]
    return row.memory_bytes / predicted


def memory_errors(rows: Iterable[Row]) -> Errors:
    """Errors of fully described rows. Guessed stacks are excluded: they do not show the planner's error.

    A run that ran out of memory needed more than there was: at least that is known of it, if it should have fitted.
    """
    found: dict[str, list[float]] = {}
    for row in told(rows):
        if isinstance(row, Guessed):
            continue
        r = ratio(row)
        if not row.fits:
            r = capacity(row.cluster) / held(row).reserved + 0.0001
        if r is not None and (row.fits or r > 1):
            found.setdefault(row.source, []).append(r)
    tails = (
        Tail(name, len(rs), tuple(sorted((round(r, 4) for r in rs if round(r, 4) > 1), reverse=True)))
        for name, rs in sorted(found.items())
    )
    return Errors(tuple(tails))


def score(errors: list[float]) -> dict[str, Any]:
    return {
        "rows": len(errors),
        "mean_%": round(100 * statistics.fmean(errors), 1),
        "median_%": round(100 * statistics.median(errors), 1),
        "worst_%": round(100 * max(errors), 1),
    }


def memory_scores(rows: Iterable[Row], doubt: Errors | None = None) -> dict[str, Any]:
    """Predicted against measured bytes, and counts of the three verdicts by actual outcome.

    `doubt`: errors to judge by; without, those of the rows themselves and what is shipped of other sources. Those of a row's own
    source never judge it.
    """
    known = told(rows)
    errors: dict[str, list[float]] = {}
    for row in known:
        r = ratio(row)
        if r is not None:
            errors.setdefault(row.source, []).append(abs(1 / r - 1))
    doubt = _with_shipped(memory_errors(known)) if doubt is None else doubt
    answers = {"out_of_memory": _answers(r for r in known if not r.fits)}
    answers["ran"] = _answers(r for r in known if r.fits)
    shares: list[float] = []
    figures = above = 0
    for row in known:
        others = doubt.without(row.source)
        verdict = judge(held(row).reserved, capacity(row.cluster), others)
        answers["ran" if row.fits else "out_of_memory"][verdict.word] += 1
        if verdict.word == "tight" and verdict.share is not None:
            shares.append(verdict.share)
        r = ratio(row)
        figures += r is not None
        above += r is not None and r * others.full > 1
    return {
        "by_source": {k: score(v) for k, v in sorted(errors.items())},
        "all": score([e for v in errors.values() for e in v]) if errors else None,
        "fits_up_to_%": round(100 * doubt.full, 1),
        "answers": answers,
        "tight_mean_share_%": round(100 * statistics.fmean(shares), 1) if shares else None,
        "above_the_limit_of_other_sources": {"figures": figures, "above": above},
    }


def _with_shipped(errors: Errors) -> Errors:
    """Add the shipped errors: few rows do not show the range of errors."""
    here = {s.name for s in errors.sources}
    return Errors((*errors.sources, *(s for s in shipped_errors().sources if s.name not in here)))


def _answers(rows: Iterable[Row]) -> dict[str, int]:
    return {"rows": sum(1 for _ in rows), "does not fit": 0, "tight": 0, "fits": 0}


def errors_toml(errors: Errors) -> str:
    """The text of memory_error.toml with these errors."""
    lines = [
        "# How far published memory figures were above their prediction: measured over predicted (memory.py), both of the same kind",
        "# (allocated, reserved, or what the device showed). Written by bench/plan_accuracy.py --calibration from the rows that say all",
        "# that memory depends on. `figures` counts all of a source, `above` has those beyond 1, from the largest; a run that ran out of",
        "# memory and should have fitted counts as just above what there was. plan/cost/memory_fit.py calls a",
        f"# layout tight where {SURE * 100:g} % of all figures or more were as far above as the GPU's memory is above what the layout needs.",
    ]
    for s in errors.sources:
        lines += ["", "[[source]]", f"name = {json.dumps(s.name)}", f"figures = {s.figures}"]
        parts = [f"    {', '.join(map(str, s.above[i : i + 12]))}," for i in range(0, len(s.above), 12)]
        lines += ["above = [", *parts, "]"] if parts else ["above = []"]
    return "\n".join(lines) + "\n"
