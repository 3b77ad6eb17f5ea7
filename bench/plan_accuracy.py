"""Errors of predictions against published results: calibrated and held out, fit, intervals, plan regret.

    python bench/plan_accuracy.py published.csv [--write bench/plan_accuracy.json] [--calibration src/seatrial/plan/cost/calibration.toml]

Any CSV with these columns works. Calibration sets for a stack's pace on a GPU, from easy to hard:

    own rows          all rows, times the median error of the same source's other rows of this stack and GPU: those of the same
                      model and precision, as a plan takes the pace of earlier runs, else all
    in sample         all rows
    other models      rows of other models
    other sources     rows of other sources; other publishers: without any row of the same publisher, as for a new source
      away, unmeasured: and without rows of the same family on the same GPU, and without any of that GPU
    other GPUs        rows of other GPUs
    other generations rows of other architectures

As baselines from the same rows: one MFU per GPU, and our cost model with a single pace.

The error of a row is |predicted / measured - 1|. `--calibration` writes the paces fitted to all rows, and
memory_error.toml, the excess of measured over predicted memory; nothing else is fitted. Rows of undescribed sources
are a separate group (`guessed`): they affect no pace and no limit.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_fit import calibrate, line, own_pace, predicted, seconds
from plan_memory import errors_toml, fits, memory_errors, memory_scores, score
from plan_rows import Guessed, Row, read
from seatrial.plan.cost.calibration import Calibration, Pace, Z, shipped
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import Kernels
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import step_parts

# What rows are left out for a row: those that share one of these with it.
WAYS: dict[str, Callable[[Row], tuple[str, ...]]] = {
    "in sample": lambda row: (),
    "other models": lambda row: (row.name,),
    "other sources": lambda row: (row.source,),
    "other publishers": lambda row: (publisher(row.source),),
    "away": lambda row: (publisher(row.source), f"{shipped().family.get(row.stack)} on {row.gpu}"),
    "unmeasured": lambda row: (publisher(row.source), row.gpu),
    "other GPUs": lambda row: (row.gpu,),
    "other generations": lambda row: (row.cluster.gpu.architecture,),
}
SHARED = ("typical", "operators", "attention", "power", "fp8", "away", "unmeasured")
TABLES = ("families", "operators_of", "architectures")


def settled(row: Row) -> Row:
    """Fill in an unstated microbatch: the fastest one that fits."""
    recipe = row.recipe
    if row.free_microbatch:
        each = recipe.global_batch // recipe.layout.data_parallel
        choices = [replace(recipe, microbatch=m) for m in (1, 2, 4, 8) if each % m == 0]
        rows = [replace(row, recipe=r) for r in choices] or [row]
        able = [r for r in rows if fits(r)] or rows[:1]
        recipe = min(able, key=lambda r: seconds(r, 1.1)).recipe
    return replace(row, recipe=recipe)


def paced(known: Calibration, row: Row) -> Pace:
    return known.pace(row.stack, row.cluster.gpu, row.recipe.precision)


class Scores:
    """Errors and coverage of one calibration set."""

    def __init__(self) -> None:
        self.rows: list[tuple[Row, float, bool, str]] = []  # with log(predicted / measured)

    def add(self, row: Row, known: Calibration, factor: float = 1.0) -> None:
        if not known.entries or row.step_s is None:
            return
        pace = paced(known, row)
        step = predicted(row, pace) * factor
        off = math.log(step / row.step_s)
        self.rows.append((row, off, abs(off) <= Z * pace.spread, pace.kind))

    def table(self, key: Callable[[Row], str] | None = None) -> dict[str, Any]:
        groups: dict[str, list[tuple[float, bool]]] = {}
        for row, off, inside, _ in self.rows:
            groups.setdefault(key(row) if key else "all", []).append((abs(math.expm1(off)), inside))
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


def spreads(ways: dict[str, Scores]) -> dict[str, float]:
    """Additional spreads of an extrapolated pace (calibration.py): what the mean square of log(predicted / measured) gains.

    Over the stacks on a GPU whose pace is borrowed without their publisher, so that all three sets have the same rows.
    """
    borrowed = {(r.stack, r.gpu) for r, _, _, kind in ways["other publishers"].rows if kind == "borrowed"}
    squares = []
    for name in ("other publishers", "away", "unmeasured"):
        offs: dict[tuple[str, str], list[float]] = {cell: [] for cell in borrowed}
        for row, off, *_ in ways[name].rows:
            offs.get((row.stack, row.gpu), []).append(off)
        squares.append(sum(statistics.fmean(v) ** 2 for v in offs.values() if v) / max(1, len(borrowed)))
    gains = (max(0.0, after - before) for before, after in itertools.pairwise(squares))
    return dict(zip(("away", "unmeasured"), (round(math.sqrt(g), 3) for g in gains), strict=True))


def publisher(source: str) -> str:
    """The publisher of a source: its first word. Sources of one publisher are correlated."""
    return source.replace("-", " ").split()[0]


def regret(rows: list[Row], known: Calibration) -> dict[str, Any]:
    """For sources that tried several layouts of the same work: cost of the predicted best over the measured best."""
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
        chosen = min(group, key=lambda r: predicted(r, paced(known, r)))
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
        r, pace = row.recipe, paced(known, row)
        p = step_parts(
            row.model, r, Fabric.of(row.cluster, row.recipe), stacks()[row.stack], pace.value, pace.factors
        )
        kernels = p.products + p.attention + p.operators
        found.append(kernels * r.layout.pipeline / (row.model.num_hidden_layers * r.microbatches))
    return round(1e3 * min(found), 2) if found else None


def baselines(rows: list[Row], left_out: Callable[[Row], tuple[str, ...]]) -> dict[str, list[float]]:
    """Errors of baselines fitted to the rows not held out: one MFU per GPU; our cost model with a single pace."""
    mfu = {id(r): _flops_s(r) for r in rows}
    own = {id(r): own_pace(r) or 1.0 for r in rows}
    errors: dict[str, list[float]] = {"constant MFU": [], "one pace": []}
    for group in dict.fromkeys(left_out(r) for r in rows):
        kept = [r for r in rows if not {*left_out(r)} & {*group}]
        if not kept:
            continue
        pace = statistics.median(own[id(r)] for r in kept)
        for row in (r for r in rows if left_out(r) == group):
            assert row.step_s is not None
            alike = [r for r in kept if r.gpu == row.gpu] or kept
            share = statistics.median(mfu[id(r)] for r in alike)
            errors["constant MFU"].append(abs(mfu[id(row)] / share - 1))
            errors["one pace"].append(abs(seconds(row, pace) / row.step_s - 1))
    return errors


def _flops_s(row: Row) -> float:
    """Model FLOP/s over the peak."""
    r = row.recipe
    flops = row.model.flops_per_token(r.sequence) * r.global_batch * r.sequence / r.world
    assert row.step_s is not None
    return flops / row.step_s / Kernels(row.cluster.gpu, r.precision).peak


def constants(known: Calibration) -> dict[str, int]:
    """Number of constants: fitted to rows, and set by hand (stacks.toml, numbers in plan/cost)."""
    fitted = len(known.entries) + len(SHARED) + sum(len(getattr(known, name)) for name in TABLES)
    folder = Path(step_parts.__code__.co_filename).parent
    table = tomllib.loads((folder / "stacks.toml").read_text(encoding="utf-8"))
    own = [v for stack in table.values() for v in stack.values()]
    hand = sum(len(v) if isinstance(v, list) else type(v) in (int, float) for v in own)
    for name in ("kernels", "collectives", "calibration", "step", "memory", "overlap"):
        module = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        numbers = [n for s in module.body if isinstance(s, ast.Assign) for n in ast.walk(s.value)]
        hand += sum(isinstance(n, ast.Constant) and isinstance(n.value, int | float) for n in numbers)
    return {"fitted": fitted, "set by hand": hand}


def _same_kernels(row: Row) -> tuple[str, ...]:
    return row.source, row.stack, row.gpu


def _same_work(row: Row) -> tuple[str, str]:
    return row.name, row.recipe.precision


def evaluate(rows: list[Row]) -> tuple[dict[str, Any], Calibration]:
    timed = [r for r in rows if r.step_s is not None and r.fits]
    numbered = list(enumerate(timed))
    lines = {i: line(row) for i, row in numbered}
    like = shipped()
    everything = calibrate(numbered, lines, like)
    result: dict[str, Any] = {"rows": len(rows), "timed": len(timed), "ways": {}}
    ratios = [(r.step_s or 0.0) / predicted(r, paced(everything, r)) for r in timed]
    own = Scores()
    for i, row in numbered:
        beside = [(ratios[k], r) for k, r in numbered if k != i and _same_kernels(r) == _same_kernels(row)]
        same_work = [ratio for ratio, r in beside if _same_work(r) == _same_work(row)]
        used = same_work or [ratio for ratio, _ in beside] or [1.0]
        own.add(row, everything, statistics.median(used))
    moved, beside_peer = 0.0, [("peer", r.peer_s / r.step_s) for r in timed if r.peer_s and r.step_s]
    result["own_rows"] = own.table().get("all")
    ways = {name: Scores() for name in WAYS}
    for name, left_out in WAYS.items():
        scores = ways[name]
        for group in dict.fromkeys(left_out(r) for r in timed):
            kept = ((i, r) for i, r in numbered if not {*left_out(r)} & {*group})
            known = calibrate(kept, lines, like) if group else everything
            for row in timed:
                if left_out(row) == group:
                    scores.add(row, known)
                elif name == "other sources":
                    pace = paced(everything, row)
                    change = abs(math.log(predicted(row, paced(known, row)) / predicted(row, pace)))
                    moved = max(moved, change / (Z * pace.spread))
        beside_peer += [(name, math.exp(off)) for row, off, *_ in scores.rows if row.peer_s]
        result["ways"][name] = {
            "all": scores.table().get("all"),
            **{k: score(errors) if errors else None for k, errors in baselines(timed, left_out).items()},
            "by_source": scores.table(lambda r: r.source),
            "by_stack": scores.table(lambda r: f"{r.stack} on {r.gpu}"),
            "by_gpu": scores.table(lambda r: r.gpu),
            "by_precision": scores.table(lambda r: r.recipe.precision),
            "intervals": scores.kinds(),
        }
    # Rows for which another planner (SimuMax) published predictions: its errors, and ours by what was left out.
    result["beside_peer"] = {
        name: score([abs(e - 1) for n, e in beside_peer if n == name]) for name in dict(beside_peer)
    }
    # What leaving out a source changes of the others' predictions, at most, as a share of their intervals.
    result["moved_by_one_source"] = round(moved, 2)
    everything = replace(everything, **spreads(ways))
    result["constants"] = constants(everything)
    result["regret"] = regret(timed, everything)
    result["shortest_layer_ms"] = shortest(timed, everything)
    result["memory"] = memory_scores(rows)
    return result, everything


def guessed_scores(rows: list[Row], known: Calibration, described: list[Row]) -> dict[str, Any]:
    """Scores of rows with guessed stack and network, calibrated by described rows; not part of other scores."""
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
    """calibration.toml with these factors."""
    lines = [
        "# How much longer a stack's kernels take on a GPU than good kernels alone, see calibration.py. Written by bench/plan_accuracy.py",
        "# --calibration from published results, as bench/plan_fit.py says. `seatrial check` and real runs replace paces.",
        "",
        "[family]  # of stacks: those that share most of their kernels",
        *(f'"{a}" = "{b}"' for a, b in known.family.items()),
    ]
    shared = {name: getattr(known, name) for name in SHARED}
    for name, table in (("shared", shared), *((n, getattr(known, n)) for n in TABLES)):
        lines += ["", f"[{name}]", *(f'"{k}" = {v}' for k, v in table.items())]
    for e in sorted(known.entries, key=lambda e: (e.stack, e.gpu)):
        lines += ["", "[[pace]]", f'stack = "{e.stack}"', f'gpu = "{e.gpu}"', f"pace = {e.pace}"]
        lines += [f"rows = {e.rows}", f"sources = {e.sources}", f'architecture = "{e.architecture}"']
        lines += [f"source = {json.dumps(e.source)}"]
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
        print(f"{name:18}", way["all"], way["intervals"])
        print(f"{'':18}", {k: way[k] for k in ("constant MFU", "one pace")})
    print("a source's rows by its other rows", result["own_rows"])
    print("constants", result["constants"], "most moved by one source", result["moved_by_one_source"])
    for name, found in result["ways"]["other sources"]["by_source"].items():
        print(f"  other sources: {name[:60]:60} {found}")
    print("rows that SimuMax predicted", result["beside_peer"])
    print("regret", result["regret"])
    print("memory", json.dumps(result["memory"], indent=1))
    print("guessed stacks", json.dumps(result["guessed"], indent=1))
    print("left out", left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
