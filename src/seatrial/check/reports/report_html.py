"""A report as one self-contained HTML file, report.html filled in."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.base.page import render
from seatrial.check.judging.findings import ORDER, Finding, codes
from seatrial.check.judging.measured import lines as rate_lines
from seatrial.check.judging.report import Report
from seatrial.check.ranges import listed, shortened
from seatrial.check.reports.adapters import SCHEDULERS, Order
from seatrial.check.reports.report_table import (
    conclusion,
    contains_evidence,
    expected,
    groups,
    lead,
    message,
    places,
    targets,
    would_refuse,
)

_BLAMED = {"gpu": "GPU", "nvlink": "NVLink", "nic": "NIC, cable or port"}
_DONE = {None: "not run", True: "done", False: "failed"}


def page(report: Report, orders: Sequence[Order] = (), title: str = "Seatrial check") -> str:
    """The whole document. `orders` are the commands that remove the failed nodes."""
    check_run = report.check_run
    blames = () if check_run is None else check_run.blames
    seen = {b.target for b in blames}
    passes = [f for f in report.findings if f.verdict == "PASS"]
    found = [
        f
        for f in report.findings
        if f.verdict != "PASS" and not (f.target in seen and f.code.startswith("BLM"))
    ]
    of = {verdict: [n for n, v in report.nodes.items() if v == verdict] for verdict in ORDER}
    nodes = [(name, verdict) for verdict, names in of.items() for name in shortened(names)]
    return render(
        "check/reports/report.html",
        title=title,
        report=report,
        lead=lead(report),
        conclusion=conclusion(report),
        bad_nodes=[(name, verdict) for name, verdict in nodes if verdict != "PASS"],
        good_nodes=[(name, verdict) for name, verdict in nodes if verdict == "PASS"],
        good_count=len(of["PASS"]),
        blames=[(b, _BLAMED.get(b.kind, b.kind), codes()[b.code].action) for b in blames],
        unsettled="" if check_run is None else listed(check_run.unsettled, 24),
        findings=[_finding(group) for group in groups(found)],
        orders=_orders(report, orders),
        stages=[] if check_run is None else check_run.stages(),
        rates=[] if check_run is None else rate_lines(check_run.measured),
        passes=[(group[0].code, targets(group), message(group[0])) for group in groups(passes)],
        pass_count=len(passes),
        outputs=sorted(report.judged, key=lambda j: ORDER.index(j.verdict)),
    )


def _finding(group: Sequence[Finding]) -> dict[str, object]:
    f = group[0]
    rows: list[tuple[str, str]] = []
    if f.measured is not None:
        value = f.measured if isinstance(f.measured, str) else f"{f.measured:.6g}"
        rows.append(("measured", f"{value} {f.unit}".strip()))
    if f.expected is not None:
        rows.append(("means" if f.expected.value is None else "expected", expected(f.expected)))
    if f.peers_median is not None:
        deviation = "" if f.deviation is None else f" ({f.deviation:+.0%})"
        rows.append(("peers", f"median {f.peers_median:.6g} {f.unit}{deviation}"))
    if f.why_unjudged and f.why_unjudged not in f.message:
        rows.append(("why", f.why_unjudged))
    if f.action:
        rows.append(("action", f.action))
    if (seen := places(group)) and not contains_evidence(f):
        rows.append(("evidence", seen))
    return {
        "verdict": f.verdict,
        "code": f.code,
        "title": codes()[f.code].title,
        "where": targets(group),
        "message": message(f),
        "rows": rows,
    }


def _orders(report: Report, orders: Sequence[Order]) -> list[tuple[str, str, list[str]]]:
    """By scheduler: its name, why --apply would refuse, and the commands with what became of them."""
    entries = []
    for scheduler in SCHEDULERS:
        if mine := [o for o in orders if o.scheduler == scheduler]:
            lines = [f"{o.text}   # {_DONE[o.done]}" for o in mine]
            entries.append((scheduler.capitalize(), would_refuse(report, mine), lines))
    return entries
