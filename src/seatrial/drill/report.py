"""The results of a drill, as JSON and as a Markdown page."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial import __version__
from seatrial.base import units
from seatrial.base.atomic import write_json, write_text
from seatrial.drill.conduct import Drill, Result
from seatrial.drill.expectation import OTHER_WORLD
from seatrial.drill.judge import Judgement
from seatrial.drill.reference import MARGIN, Reference
from seatrial.record.folder import RunFolder
from seatrial.record.running import running

SCHEMA_VERSION = 1

COLUMNS = ("scenario", "detected in", "recovered in", "redone", "lost", "ledger", "loss", "verdict")


def document(drill: Drill, seconds: float) -> dict[str, Any]:
    """The whole drill as plain values."""
    verdicts = Counter(r.judgement.verdict for r in drill.results)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": drill.job.name,
        "source": drill.job.source,
        "folder": str(drill.root),
        "time": time.time(),
        "seconds": seconds,
        "machine": {
            "host": platform.node(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "seatrial": __version__,
        },
        "seed": drill.seed,
        "steps": drill.cadence.steps,
        "layout": drill.job.layout.as_dict(),
        "tolerance_other_world": OTHER_WORLD,
        "verdicts": {v: verdicts.get(v, 0) for v in ("PASS", "FAIL", "UNJUDGED")},
        "references": [
            {
                "folder": str(reference.folder.path),
                "again": None if reference.again is None else str(reference.again.folder.path),
                "apart": _apart(reference),
                "layout": reference.copy.job.layout.as_dict(),
                "steps": reference.steps,
                "median_step_s": reference.step_s,
                "changes": [vars(c) for c in reference.copy.changes],
            }
            for reference in drill.references.values()
        ],
        "scenarios": [_scenario(result) for result in drill.results],
    }


def _apart(reference: Reference) -> dict[str, float]:
    """How far two undisturbed runs are apart at the end of all steps; empty if there is one."""
    found = reference.apart(reference.steps)
    return {what: apart for (step, what), apart in found.items() if step == reference.steps}


def _scenario(result: Result) -> dict[str, Any]:
    return {
        "name": result.scenario.name,
        "about": result.scenario.about,
        "expected": result.scenario.expect.in_words(),
        **result.judgement.as_dict(),
        "seconds": result.seconds,
        "folder": None if result.folder is None else str(result.folder),
        "changes": [vars(c) for c in result.changes],
        "injections": [vars(i) for i in result.injections],
    }


def row(result: Result) -> tuple[str, ...]:
    """The result's row of the table, under COLUMNS."""
    judgement = result.judgement
    return (
        result.scenario.name,
        _seconds(judgement.detected_in_s),
        _seconds(judgement.recovered_in_s),
        "-" if judgement.steps_redone is None else str(judgement.steps_redone),
        _seconds(judgement.work_lost_s),
        _holds(judgement, "ledger", "exact"),
        _loss(judgement),
        judgement.verdict,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else units.duration(value) if value else "0 s"


def _holds(judgement: Judgement, name: str, word: str) -> str:
    found = next((c for c in judgement.checks if c.name == name), None)
    return "-" if found is None else word if found.ok else "WRONG"


def _loss(judgement: Judgement) -> str:
    word = _holds(judgement, "losses", "equal")
    if word == "equal" and judgement.largest_difference:
        return f"to {judgement.largest_difference:.0e}"
    return word


def summary(results: Sequence[Result]) -> str:
    """The number of results per verdict, as text."""
    verdicts = Counter(r.judgement.verdict for r in results)
    parts = [f"{verdicts[v]} {v}" for v in ("PASS", "FAIL", "UNJUDGED") if verdicts[v]]
    return ", ".join(parts) if parts else "nothing was run"


def markdown(drill: Drill, seconds: float) -> str:
    """The results as a Markdown page."""
    job = drill.job
    lines = [
        f"# Drill of {job.name}: {summary(drill.results)}",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M')} on {platform.node()} ({os.cpu_count()} cores), Seatrial {__version__}, "
        f"{units.duration(seconds)}; {job.layout}; seed {drill.seed}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(row(result)) + " |" for result in drill.results]
    lines += [
        "",
        "detected in: from the fault to the first event that reports it. recovered in: from the fault to the end of "
        "the first step after it. redone: steps trained again. lost: the time that those steps took before. loss: every "
        "loss and gradient norm against the run that never failed; equal means the same bits.",
        "",
    ]
    for reference in drill.references.values():
        if apart := ", ".join(f"{what} {value:.1e}" for what, value in _apart(reference).items()):
            lines += [
                f"{reference.folder.path.name}: two undisturbed runs differ by (relative) {apart}; allowed are {MARGIN:g} times these.",
                "",
            ]
    for result in drill.results:
        lines += [
            f"## {result.scenario.name}: {result.judgement.verdict}",
            "",
            result.scenario.about + ".",
            "",
        ]
        for check in result.judgement.checks:
            mark = {True: "holds", False: "**FAILED**", None: "not judged"}[check.ok]
            lines.append(f"- {check.name}: {mark}. {_cell(check.text)}")
        lines.append("")
    lines += ["## How the copies differ from the job", ""]
    lines += ["| run | key | job | copy | why |", "|---|---|---|---|---|"]
    for reference in drill.references.values():
        name = reference.folder.path.name
        lines += [
            f"| {name} | {c.key} | {_value(c.job)} | {_value(c.copy)} | {_cell(c.why)} |"
            for c in reference.copy.changes
            if c.key != "name"
        ]
    # No set: values may be lists.
    common = [(c.key, c.copy) for r in drill.references.values() for c in r.copy.changes]
    for result in drill.results:
        lines += [
            f"| {result.scenario.name} | {c.key} | {_value(c.job)} | {_value(c.copy)} | {_cell(c.why)} |"
            for c in result.changes
            if c.key not in ("name", "checkpoint.keep") and (c.key, c.copy) not in common
        ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return "not set" if value is None else _cell(str(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(drill: Drill, seconds: float) -> tuple[Path, dict[str, Any], Path | None]:
    """Write report.json and report.md to the drill's folder; (the page, the document, path of a copy or None).

    The job's own run folder gets a copy, if it exists and is not running.
    """
    value = document(drill, seconds)
    page = drill.root / "report.md"
    write_json(drill.root / "report.json", value)
    write_text(page, markdown(drill, seconds))
    live = RunFolder(drill.runs / drill.job.name)
    if not live.is_run() or running(live) is not None:
        return page, value, None
    live.reports.mkdir(exist_ok=True)
    stem = f"drill-{drill.root.name.removeprefix(drill.job.name + '-')}"
    for name in ("report.md", "report.json"):
        shutil.copyfile(drill.root / name, live.reports / f"{stem}{Path(name).suffix}")
    return page, value, live.reports / f"{stem}.md"
