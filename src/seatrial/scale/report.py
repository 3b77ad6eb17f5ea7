"""The results of a measurement as a JSON document, table rows and lines of text."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from seatrial import __version__
from seatrial.base import units
from seatrial.plan.report.step_waterfall import Row, StepWaterfall
from seatrial.record.collectives import Issued
from seatrial.record.jsonl import plain
from seatrial.record.stages import STAGES
from seatrial.scale.cause import lines as cause_lines
from seatrial.scale.conduct import Measurement
from seatrial.scale.results import Measured, Results
from seatrial.scale.sizes import in_words
from seatrial.scale.statistics import LEVEL, Estimate
from seatrial.scale.steps import Steps

SCHEMA_VERSION = 1

COLUMNS = (
    "nodes", "GPUs", "batch", "runs", "tokens/s", "tok/s/GPU", "MFU", "efficiency", "of half", "predicted",
    "GPU s/Mtok",
)  # fmt: skip


def document(results: Results) -> dict[str, Any]:
    """The report as JSON values."""
    measurement = results.measurement
    options = measurement.options
    value = {
        "schema_version": SCHEMA_VERSION,
        "job": measurement.job.name,
        "source": measurement.job.source,
        "folder": str(measurement.state.folder),
        "time": time.time(),
        "machine": {
            "host": platform.node(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "seatrial": __version__,
        },
        "scaling": options.mode,
        "steps": options.steps,
        "precision": options.precision,
        "repeats": options.repeats,
        "seed": options.seed,
        "confidence": LEVEL,
        "budget_gpu_hours": options.budget,
        "spent_gpu_hours": measurement.state.spent,
        "stopped": measurement.stopped or None,
        "traces": [str(path) for path in measurement.traces()],
        "sizes": [_size(results, size) for size in results.sizes],
        "gates": [asdict(judgement) for judgement in results.gates],
        "meets_gates_nodes": results.meets,
        "losses": [asdict(judgement) for judgement in results.losses],
        "fits": [asdict(fit) for fit in results.fits],
        "not_fitted": results.why_not_fitted() or None,
        "discarded": [
            {"folder": t.folder, "nodes": t.nodes, "problem": t.problem}
            for t in measurement.state.trials
            if t.problem
        ],
        "changes": [
            {"nodes": size.nodes, "changes": [vars(change) for change in size.changes]}
            for size in measurement.sizes
        ],
    }
    return dict(plain(value))


def _size(results: Results, size: Measured) -> dict[str, Any]:
    point = size.predicted
    found = None if point is None else point.prediction
    known = point is not None and point.tokens_per_s is not None and found is not None
    return {
        "nodes": size.size.nodes,
        "gpus": size.size.gpus,
        "global_batch": size.size.job.train.global_batch,
        "layout": size.size.job.layout.as_dict(),
        "runs": size.runs,
        "warm_up_steps": size.warm_up,
        "unsettled_runs": size.unsettled,
        "tokens_per_s": _interval(size.tokens_per_s),
        "tokens_per_s_per_gpu": size.per_gpu,
        "mfu": size.mfu,
        "tensor_active": _interval(size.tensor_active),
        "efficiency": _interval(size.efficiency),
        "efficiency_of_doubling": _interval(size.doubling),
        "gpu_s_per_million_tokens": size.gpu_s_per_million,
        "cost_per_million_tokens": results.cost(size),
        "predicted": {
            "tokens_per_s": point.tokens_per_s,
            "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
            "low_step_s": found.low_s,
            "high_step_s": found.high_s,
            "mfu": found.mfu,
            "efficiency": point.efficiency,
        }
        if known and point is not None and found is not None
        else None,
        "why_not_predicted": size.why_not_predicted or None,
        "problem": size.problem or None,
        "step_split": None if size.steps is None else size.steps.account.as_dict(),
        "collectives": _collectives(size.steps),
        "counters": [node.as_dict() for node in size.steps.counters] if size.steps is not None else [],
        "groups": [asdict(group) for group in results.measurement.groups(size.size.nodes)],
        "waterfall": None if size.waterfall is None else size.waterfall.as_dict(),
        "causes": [asdict(cause) for cause in size.causes],
    }


def _collectives(steps: Steps | None) -> dict[str, Any]:
    """Dimension -> collectives that one rank issues per step."""
    every = {} if steps is None else steps.collectives
    return {name: {**asdict(each), "message_bytes": each.message_bytes} for name, each in every.items()}


def _interval(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else {"mean": value.mean, "low": value.low, "high": value.high, "n": value.n}


def row(size: Measured, results: Results) -> tuple[str, ...]:
    """The table row of a size, matching `columns`."""
    speed, point = size.tokens_per_s, size.predicted
    predicted = None if point is None else point.tokens_per_s
    cells = [
        str(size.size.nodes),
        str(size.size.gpus),
        str(size.size.job.train.global_batch),
        str(size.runs),
        "-" if speed is None else f"{speed.mean:,.0f}{_off(speed)}",
        "-" if size.per_gpu is None else f"{size.per_gpu:,.0f}",
        "unknown" if size.mfu is None else f"{size.mfu * 100:.1f} %",
        share(size.efficiency),
        share(size.doubling),
        "unknown" if predicted is None else f"{predicted:,.0f}",
        "-" if size.gpu_s_per_million is None else f"{size.gpu_s_per_million:,.2f}",
    ]
    cost = results.cost(size)
    return (*cells, *(() if results.price is None else ("-" if cost is None else f"{cost:.4g}",)))


def split_rows(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of a table: seconds per step of each stage at each size, if known."""
    known = [size.steps for size in results.sizes if size.steps is not None]
    nodes = [size.size.nodes for size in results.sizes if size.steps is not None]
    stages = [name for name in STAGES if any(name in steps.account.seconds for steps in known)]
    rows = [
        (name.replace("_", " "), *(_share(steps.account.seconds.get(name, 0.0), steps) for steps in known))
        for name in stages
    ]
    rows.append(("step", *(units.duration(steps.account.split.step_s) for steps in known)))
    return ("stage", *map(in_words, nodes)), rows + _message_rows(known)


def _message_rows(known: Sequence[Steps]) -> list[tuple[str, ...]]:
    """Rows with the mean message size and number of collectives per step, by dimension."""

    def cell(each: Issued | None) -> str:
        return "-" if each is None else f"{units.memory(each.message_bytes)} x {each.calls:,.0f}"

    names = [n for n in STAGES if any(n in steps.collectives for steps in known)]
    return [
        (f"{n.replace('_', ' ')} messages", *(cell(steps.collectives.get(n)) for steps in known))
        for n in names
    ]


def waterfall_rows(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of a table: the parts of a step at each size, with the plan's prediction if there is one."""
    sizes = [(size.size.nodes, size.waterfall) for size in results.sizes if size.waterfall is not None]
    falls = [fall for _, fall in sizes]
    beside = any(fall.predicted_step_s is not None for fall in falls)
    headings = [cell for n, _ in sizes for cell in (in_words(n), *(("plan", "ratio") if beside else ()))]
    rows = []
    for same in zip(*(fall.rows for fall in falls), strict=True):
        if any(row in fall.shown for row, fall in zip(same, falls, strict=True)):
            cells = [c for row, fall in zip(same, falls, strict=True) for c in _cells(row, fall, beside)]
            rows.append((same[0].name, *cells))
    total = [c for fall in falls for c in _cells(fall.total, fall, beside)]
    return ("step part", *headings), [*rows, ("step", *total)]


def _cells(row: Row, fall: StepWaterfall, beside: bool) -> Iterator[str]:
    yield "unknown" if row.seconds is None else _of_step(row.seconds, fall.step_s)
    if beside:
        whole = fall.predicted_step_s
        yield "-" if row.predicted_s is None or whole is None else _of_step(row.predicted_s, whole)
        yield "-" if row.ratio is None else f"{row.ratio:.2f}"


def _of_step(seconds: float, step_s: float) -> str:
    return f"{units.duration(seconds)} {100 * seconds / step_s:.0f} %"


def _share(seconds: float, steps: Steps) -> str:
    return _of_step(seconds, steps.account.split.step_s)


def columns(results: Results) -> tuple[str, ...]:
    """The headings of the table; with a price, including the cost per million tokens."""
    return COLUMNS if results.price is None else (*COLUMNS, "cost/Mtok")


def share(value: Estimate | None) -> str:
    """An efficiency as text: 91.2 % (90.1-92.3)."""
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{value.mean * 100:.1f} %"
    return f"{value.mean * 100:.1f} % ({value.low * 100:.1f}-{value.high * 100:.1f})"


def _off(value: Estimate) -> str:
    return "" if value.half is None else f" ±{value.half * 100:.1f} %"


def lines(results: Results) -> Iterator[tuple[str, str]]:
    """Further results, as pairs of label and text."""
    for judgement in results.gates:
        yield judgement.verdict, f"{judgement.name}: {judgement.text}"
    if results.meets is not None:
        met = "none of the measured sizes"
        if results.meets:
            met = f"smallest {results.meets[0]} nodes, largest {results.meets[-1]}"
        yield "passing sizes", f"{met}: all doublings up to the size pass"
    for judgement in results.losses:
        yield judgement.verdict, f"{judgement.name}: {judgement.text}"
    for size in results.sizes:
        if size.tensor_active is not None:
            text = f"active {size.tensor_active.mean * 100:.1f} % of the time"
            yield "tensor cores", f"{in_words(size.size.nodes)}: {text}"
        if size.causes and size.size.nodes not in results.passed:
            for label, text in cause_lines(size.causes):
                yield label, f"{in_words(size.size.nodes)}: {text}"
    for path in results.measurement.traces():
        yield "trace", str(path)
    base = results.sizes[0].size.nodes
    for fit in results.fits:
        text = f"contention {fit.contention.value:.2g} ({fit.contention.low:.2g}-{fit.contention.high:.2g})"
        if fit.coherency is not None:
            text += (
                f", coherency {fit.coherency.value:.2g} ({fit.coherency.low:.2g}-{fit.coherency.high:.2g})"
            )
        further = (
            f"{n * base:g} nodes {r.value * 100:.0f} % ({r.low * 100:.0f}-{r.high * 100:.0f})"
            for n, r in fit.efficiency
        )
        yield (
            "fit",
            f"{fit.law}: {text}, residuals within {fit.worst * 100:.1f} %; extrapolated: {', '.join(further)}",
        )
    if not results.fits:
        yield "fit", results.why_not_fitted()
    yield from _notes(results.measurement, results)


def _notes(measurement: Measurement, results: Results) -> Iterator[tuple[str, str]]:
    for size in results.sizes:
        if size.problem:
            yield "problem", f"{in_words(size.size.nodes)}: {size.problem}"
        if size.unsettled:
            text = f"{size.unsettled} of {size.runs} runs may include part of the warm-up: use more --steps"
            yield "note", f"{in_words(size.size.nodes)}: {text}"
    for text in dict.fromkeys(text for s in results.sizes if s.waterfall for text in s.waterfall.notes()):
        yield "parts", text
    unknown = {s.why_not_predicted for s in results.sizes if s.why_not_predicted}
    for why in sorted(unknown):
        yield "prediction", f"unknown: {why}"
    wide = [
        str(s.size.nodes)
        for s in results.sizes
        if s.efficiency is not None and (s.efficiency.half or 0.0) > measurement.options.precision
    ]
    if wide:
        text = f"wider than ±{measurement.options.precision * 100:g} % at {', '.join(wide)} nodes"
        yield "intervals", f"{text}: use more --repeats, --steps or --budget"
    if not measurement.options.groups:
        for size in results.sizes:
            used = {", ".join(t.hosts) for t in measurement.state.good(size.size.nodes) if t.hosts}
            if len(used) > 1:
                yield (
                    "note",
                    f"{in_words(size.size.nodes)}: its runs were on different nodes; use --fresh to repeat all",
                )
    if measurement.stopped:
        yield "stopped", measurement.stopped
    budget = measurement.options.budget
    of = "" if budget is None else f" of {budget:g}"
    yield "spent", f"{measurement.state.spent:.3g}{of} GPU hours in {len(measurement.state.trials)} runs"
