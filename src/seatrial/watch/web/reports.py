"""Pages from the reports of checks, scaling tests and drills. Unknown parts of another version's report are left out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from seatrial.base import units
from seatrial.base.files import names_in
from seatrial.record.folder import RunFolder
from seatrial.watch.web import blocks as b
from seatrial.watch.web.documents import Document, read_document

Parts = tuple[str, list[b.Block], list[str]]
_TONES = {"PASS": "good", "FAIL": "bad", "WARN": "warn", "UNJUDGED": "warn"}
_MOST = 300  # rows
_TIMED = re.compile(r"-\d{8}-\d{6}")
_DRILL = re.compile(r"drill-[0-9-]{1,40}\.json")


def checks(folder: RunFolder) -> Parts:
    """The latest check of this run's nodes."""
    missing: list[str] = []
    report = read_document(folder.reports / "check.json", missing)
    if report is None:
        return (
            "Checks",
            [],
            missing or ["no check: `seatrial check JOB` writes its report into the run folder"],
        )
    seconds = report.number("seconds", "total")
    nodes = [(name, item.value) for name, item in report.items("nodes") if isinstance(item.value, str)]
    found = [
        b.facts(
            "Last check",
            [
                ("verdict", _toned(report.text("verdict"))),
                ("when", b.at(report.number("time"))),
                ("took", None if seconds is None else units.duration(seconds)),
                ("nodes", f"{len(nodes):,}" if nodes else None),
                ("simulated from", report.text("simulated")),
            ],
        )
    ]
    rows = [
        [
            _toned(finding.text("verdict") or finding.text("severity")),
            finding.text("code"),
            finding.text("node") or _plain(finding.at("node")),
            finding.text("message"),
            finding.text("hint") or finding.text("action"),
        ]
        for finding in report.each("findings")
    ]
    if rows:
        found.append(b.table("Findings", ["", "code", "node", "finding", "what to do"], rows[:_MOST]))
    blames = [
        [_toned(blame.text("verdict")), blame.text("what"), blame.text("kind"), blame.text("why")]
        for blame in report.each("blames")
    ]
    if blames:
        found.append(b.table("Suspected parts", ["", "part", "kind", "reason"], blames[:_MOST]))
    bad = [[name, _toned(verdict)] for name, verdict in nodes if verdict != "PASS"]
    if bad:
        found.append(b.table("Nodes that did not pass", ["node", "verdict"], bad[:_MOST]))
    return "Checks", found, missing


def scaling(folder: RunFolder) -> Parts:
    """The scaling tests of this run's job, newest first."""
    missing: list[str] = []
    found: list[b.Block] = []
    name = folder.path.absolute().name
    for path in _reports_of(folder.path.absolute().parent / ".scale", name, missing):
        report = read_document(path / "report.json", missing)
        if report is None:
            missing.append(f".scale/{path.name}: no report yet")
            continue
        spent = report.number("spent_gpu_hours")
        found.append(
            b.facts(
                path.name,
                [
                    ("when", b.at(report.number("time"))),
                    ("scaling", report.text("scaling")),
                    ("spent", None if spent is None else f"{spent:.3g} GPU hours"),
                    ("stopped", report.text("stopped")),
                ],
            )
        )
        rows = []
        for size in report.each("sizes"):
            doubling = size.number("efficiency_of_doubling", "mean")
            rows.append(
                [
                    _plain(size.at("nodes")),
                    _plain(size.at("gpus")),
                    b.rounded(size.number("tokens_per_s", "mean")),
                    b.rounded(size.number("tokens_per_s_per_gpu")),
                    _percent(size.number("efficiency", "mean")),
                    _percent(doubling),
                    _percent(size.number("mfu")),
                    size.text("problem"),
                ]
            )
        columns = [
            "#nodes",
            "#GPUs",
            "#tokens/s",
            "#per GPU",
            "#efficiency",
            "#per doubling",
            "#MFU",
            "problem",
        ]
        found.append(b.table("Sizes", columns, rows[:_MOST]))
        gates = [[_toned(g.text("verdict")), g.text("name"), g.text("text")] for g in report.each("gates")]
        if gates:
            found.append(b.table("Gates", ["", "gate", "why"], gates[:_MOST]))
    if not found and not missing:
        missing = ["no scaling test: run `seatrial scale JOB`"]
    return "Scaling", found, missing


def drills(folder: RunFolder) -> Parts:
    """The drills with a report in the run folder, newest first."""
    missing: list[str] = []
    found: list[b.Block] = []
    names = sorted((n for n in names_in(folder.reports) if _DRILL.fullmatch(n)), reverse=True)
    for name in names[:10]:
        report = read_document(folder.reports / name, missing)
        if report is None:
            continue
        counts = [f"{_plain(item)} {verdict}" for verdict, item in report.items("verdicts")]
        found.append(
            b.facts(
                name.removesuffix(".json"),
                [("when", b.at(report.number("time"))), ("verdicts", ", ".join(counts))],
            )
        )
        rows = []
        for scenario in report.each("scenarios"):
            detected, recovered = scenario.number("detected_in_s"), scenario.number("recovered_in_s")
            rows.append(
                [
                    _toned(scenario.text("verdict")),
                    scenario.text("name"),
                    scenario.text("about"),
                    None if detected is None else units.duration(detected),
                    None if recovered is None else units.duration(recovered),
                    _plain(scenario.at("steps_redone")),
                    scenario.text("why"),
                ]
            )
        columns = ["", "scenario", "fault", "#detected in", "#recovered in", "#steps redone", "why"]
        found.append(b.table("Scenarios", columns, rows[:_MOST]))
    if not found and not missing:
        missing = [
            "no drill: `seatrial drill JOB` writes its report into the folder of a run that is not running"
        ]
    return "Drills", found, missing


def _reports_of(place: Path, run: str, missing: list[str]) -> list[Path]:
    """The folders RUN-DATE-TIME in `place`, newest first."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    except OSError as error:
        missing.append(f"{place.name} cannot be read: {error.strerror}")
        return []
    own = [n for n in names if n.startswith(run) and _TIMED.fullmatch(n.removeprefix(run))]
    return [place / name for name in sorted(own, reverse=True)[:10]]


def _toned(verdict: str) -> Any:
    return b.toned(verdict, _TONES.get(verdict.upper(), ""))


def _plain(value: Document) -> Any:
    return value.value if isinstance(value.value, int | float | str) else None


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"
