"""How far predictions are from published results: errors, what was left out of calibration, fit, intervals, plan regret.

    python bench/plan_accuracy.py published.csv [--write bench/plan_accuracy.json] [--calibration src/seatrial/plan/cost/calibration.toml]

Any CSV with these columns will do. Four ways to know a stack's pace on a GPU, from easy to hard:

    calibrated     from all rows
    other models   from the rows of other models in the same stack and GPU; and those rows of which two or more are left, for one
                   other model does not calibrate a stack
    other sources  from the rows of other sources: zero-shot for this one
    other GPUs     from the rows of other GPU generations

The error of a row is |predicted / measured - 1|. `--calibration` writes the paces that all rows give, and beside them
memory_error.toml, how far memory was above its prediction; nothing else is fitted. Rows of sources that nobody has described
are a group of their own (`guessed`): they set no pace and no limit.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_fit import calibrate, line, predicted, seconds
from plan_memory import errors_toml, fits, memory_errors, memory_scores, score
from plan_rows import Guessed, Row, read
from seatrial.plan.cost.calibration import Calibration, Z, shipped
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import step_parts

WAYS = ("shipped", "calibrated", "other models", "two or more other models", "other sources", "other GPUs")
GENERATION = {"A100": "Ampere", "H100": "Hopper", "H200": "Hopper"}


def settled(row: Row) -> Row:
    """What the source does not say of microbatches: the fastest one that fits."""
    recipe = row.recipe
    if row.free_microbatch:
        each = recipe.global_batch // recipe.layout.data_parallel
        choices = [replace(recipe, microbatch=m) for m in (1, 2, 4, 8) if each % m == 0]
        rows = [replace(row, recipe=r) for r in choices] or [row]
        able = [r for r in rows if fits(r)] or rows[:1]
        recipe = min(able, key=lambda r: seconds(r, 1.1)).recipe
    return replace(row, recipe=recipe)


class Scores:
    """Errors and coverage of one way to know the pace."""

    def __init__(self) -> None:
        self.rows: list[tuple[Row, float, bool, str]] = []

    def add(self, row: Row, known: Calibration) -> None:
        if not known.entries or row.step_s is None:
            return
        pace = known.pace(row.stack, row.gpu)
        step = predicted(row, pace)
        inside = abs(math.log(step / row.step_s)) <= Z * pace.spread
        self.rows.append((row, abs(step / row.step_s - 1), inside, pace.kind))

    def table(self, key: Callable[[Row], str] | None = None) -> dict[str, Any]:
        groups: dict[str, list[tuple[float, bool]]] = {}
        for row, error, inside, _ in self.rows:
            groups.setdefault(key(row) if key else "all", []).append((error, inside))
        out = {}
        for name, found in sorted(groups.items()):
            out[name] = score([e for e, _ in found])
            out[name]["inside_interval_%"] = round(100 * statistics.fmean(i for _, i in found), 1)
        return out

    def kinds(self) -> dict[str, Any]:
        found: dict[str, list[bool]] = {}
        for _, _, inside, kind in self.rows:
            found.setdefault(kind, []).append(inside)
        return {
            k: {"rows": len(v), "inside_%": round(100 * statistics.fmean(v), 1)} for k, v in found.items()
        }


def generation(row: Row) -> str:
    return GENERATION.get(row.gpu.split()[0].split("-")[0], "Blackwell")


def regret(rows: list[Row], known: Calibration) -> dict[str, Any]:
    """Where one source tried several layouts of the same work: what the predicted best costs over the best measured."""
    costs, choices = [], 0
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        r = row.recipe
        groups.setdefault(
            (row.source, row.name, row.gpu, r.world, r.global_batch, r.sequence, r.precision), []
        ).append(row)
    for group in groups.values():
        layouts = {(r.recipe.layout.tensor, r.recipe.layout.pipeline, r.recipe.microbatch) for r in group}
        if len(layouts) < 3:
            continue
        choices += 1
        chosen = min(group, key=lambda r: predicted(r, known.pace(r.stack, r.gpu)))
        best = min(r.step_s for r in group if r.step_s)
        costs.append((chosen.step_s or 0.0) / best - 1)
    if not costs:
        return {"groups": 0}
    return {
        "groups": choices,
        "mean_%": round(100 * statistics.fmean(costs), 1),
        "worst_%": round(100 * max(costs), 1),
    }


def shortest(rows: list[Row], known: Calibration) -> float | None:
    """Milliseconds of the shortest layer: kernels of one microbatch, forward and backward (plan/search/caution.py); None without rows."""
    found = []
    for row in rows:
        r, pace = row.recipe, known.pace(row.stack, row.gpu)
        p = step_parts(
            row.model, r, Fabric.of(row.cluster, row.recipe), stacks()[row.stack], pace.value, pace.factors
        )
        kernels = p.products + p.attention + p.operators
        found.append(kernels * r.layout.pipeline / (row.model.num_hidden_layers * r.microbatches))
    return round(1e3 * min(found), 2) if found else None


def evaluate(rows: list[Row]) -> tuple[dict[str, Any], Calibration]:
    timed = [r for r in rows if r.step_s is not None and r.fits]
    numbered = list(enumerate(timed))
    lines = {i: line(row) for i, row in numbered}
    like = shipped()
    everything = calibrate(numbered, lines, like)
    ways = {k: Scores() for k in WAYS}
    held_out: dict[tuple[str, str], Calibration] = {}

    def without(kind: str, value: str, keep: Callable[[Row], bool]) -> Calibration:
        if (kind, value) not in held_out:
            held_out[kind, value] = calibrate(((i, r) for i, r in numbered if keep(r)), lines, like)
        return held_out[kind, value]

    for row in timed:
        ways["shipped"].add(row, like)
        ways["calibrated"].add(row, everything)
        peers = [r for r in timed if (r.stack, r.gpu) == (row.stack, row.gpu) and r.name != row.name]
        if peers:
            known = without("model", row.name, lambda r, n=row.name: r.name != n)
            ways["other models"].add(row, known)
            if len({r.name for r in peers}) > 1:
                ways["two or more other models"].add(row, known)
        ways["other sources"].add(row, without("source", row.source, lambda r, s=row.source: r.source != s))
        era = generation(row)
        ways["other GPUs"].add(row, without("GPU", era, lambda r, e=era: generation(r) != e))
    result: dict[str, Any] = {"rows": len(rows), "timed": len(timed), "ways": {}}
    for name, scores in ways.items():
        result["ways"][name] = {
            "all": scores.table().get("all"),
            "by_source": scores.table(lambda r: r.source),
            "by_stack": scores.table(lambda r: f"{r.stack} on {r.gpu}"),
            "by_gpu": scores.table(lambda r: r.gpu),
            "intervals": scores.kinds(),
        }
    result["regret"] = regret(timed, everything)
    result["shortest_layer_ms"] = shortest(timed, everything)
    result["memory"] = memory_scores(rows)
    return result, everything


def guessed_scores(rows: list[Row], known: Calibration, described: list[Row]) -> dict[str, Any]:
    """Of rows whose stack and network were read from their words, by what the described ones gave; in no other score."""
    scores = Scores()
    for row in rows:
        if row.fits:
            scores.add(row, known)
    return {
        "rows": len(rows),
        "timed": len(scores.rows),
        "all": scores.table().get("all"),
        "by_source": scores.table(lambda r: r.source),
        "by_stack": scores.table(lambda r: f"{r.stack} on {r.gpu}"),
        "memory": memory_scores(rows, memory_errors(described)),
    }


def toml(known: Calibration) -> str:
    """calibration.toml with these paces."""
    lines = [
        "# How much longer a stack's kernels take on a GPU than good kernels alone (kernels.py): `pace` multiplies the time of all,",
        "# `operators` that of operators bound by memory once more, `attention` that of attention. Written by bench/plan_accuracy.py",
        "# --calibration from published results, as bench/plan_fit.py says; `spread` is the deviation that 85 of 100 rows keep within,",
        "# divided by 1.44 (drawn towards 0.08 where rows are few).",
        "# `seatrial check` and real runs replace them.",
        "",
        "[kin]  # stack = the stack whose kernels it runs; used where it was not measured itself",
        *(f'"{a}" = "{b}"' for a, b in known.kin.items()),
        "",
        "[alike]  # GPU = one of the same generation, of which paces are taken where it was not measured itself",
        *(f'"{a}" = "{b}"' for a, b in known.alike.items()),
    ]
    for e in sorted(known.entries, key=lambda e: (e.stack, e.gpu)):
        lines += ["", "[[pace]]", f'stack = "{e.stack}"', f'gpu = "{e.gpu}"', f"pace = {e.pace}"]
        lines += [f"operators = {e.operators}", f"attention = {e.attention}"]
        lines += [f"spread = {e.spread}", f"rows = {e.rows}", f"source = {json.dumps(e.source)}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--calibration", type=Path)
    options = parser.parse_args()
    try:
        rows, left = read(options.csv)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [settled(r) for r in rows]
    described = [r for r in rows if not isinstance(r, Guessed)]
    result, known = evaluate(described)
    result["guessed"] = guessed_scores([r for r in rows if isinstance(r, Guessed)], known, described)
    result["left_out"] = left
    if options.calibration:
        options.calibration.write_text(toml(known), encoding="utf-8")
        doubt = errors_toml(memory_errors(described))
        options.calibration.with_name("memory_error.toml").write_text(doubt, encoding="utf-8")
    # One line for each row of scores.
    text = re.sub(r"\{[^{}]*\}", lambda m: " ".join(m.group().split()), json.dumps(result, indent=1))
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    for name, way in result["ways"].items():
        print(f"{name:24}", way["all"], way["intervals"])
    for name, found in result["ways"]["other sources"]["by_source"].items():
        print(f"  other sources: {name[:60]:60} {found}")
    print("regret", result["regret"])
    print("memory", json.dumps(result["memory"], indent=1))
    print("guessed stacks", json.dumps(result["guessed"], indent=1))
    print("left out", left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
