"""A dry run compared with the closed form, as lines and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from seatrial.base.atomic import finite
from seatrial.plan.report.dryrun_comparison import TOLERANCE, DryRunComparison, Pair
from seatrial.ui.plan_json import recipe
from seatrial.ui.plan_words import (
    HEAD,
    Line,
    brief,
    data,
    flop,
    gib,
    many,
    note,
    pair,
    percent,
    seconds,
    table,
)


def lines(compared: Sequence[DryRunComparison], width: int) -> list[Line]:
    """A table per layout, and every difference above 5 %."""
    out: list[Line] = []
    for one in compared:
        out += [("", ""), (f"dry run of {brief(one.recipe)}", HEAD)]
        rows = [
            [
                str(rank.rank) if i == 0 else "",
                p.what,
                _figure(p, p.closed),
                _figure(p, p.counted),
                _off(p) + ("" if p.agrees else " !"),
            ]
            for rank in one.ranks
            for i, p in enumerate(p for p in rank.pairs if p.closed or p.counted)
        ]
        out += table(["rank", "", "closed form", "counted", "difference"], rows, width, left=(1,))
        apart = [f"rank {rank}: {p.what} {_off(p)}" for rank, p in one.differing]
        verdict = (
            f"all within {percent(TOLERANCE)}"
            if not apart
            else f"differ by more than {percent(TOLERANCE)}: {'; '.join(apart)}"
        )
        out += pair("verdict", verdict, width, "yellow" if apart else "green")
        out += note("; ".join([_how(one), *one.notes]), width)
    return out


def _how(one: DryRunComparison) -> str:
    traced = "the whole step traced" if one.exact else "extrapolated exactly from four small traces"
    return f"{many(len(one.ranks), 'rank')}, {traced}, {seconds(one.seconds)} of tracing, {gib(one.process_bytes)} per process"


def _figure(p: Pair, value: float) -> str:
    if p.unit == "FLOP":
        return flop(value)
    return gib(value) if p.unit == "bytes" else data(value)


def _off(p: Pair) -> str:
    return "in only one of them" if p.off == float("inf") else f"{p.off * 100:+.1f} %"


def document(compared: Sequence[DryRunComparison]) -> list[dict[str, Any]]:
    """The `dry_run` entry of the plan's JSON document."""
    return [
        dict(
            finite(
                {
                    "recipe": recipe(one.recipe),
                    "exact": one.exact,
                    "trace_s": one.seconds,
                    "process_bytes": one.process_bytes,
                    "notes": one.notes,
                    "ranks": [
                        {
                            "rank": r.rank,
                            "pipeline": r.pipeline,
                            "peak_at": r.peak_at,
                            "pairs": [asdict(p) | {"difference": p.off, "agrees": p.agrees} for p in r.pairs],
                        }
                        for r in one.ranks
                    ],
                }
            )
        )
        for one in compared
    ]
