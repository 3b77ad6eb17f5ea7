"""A report as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from seatrial.base.atomic import finite
from seatrial.check.judging.findings import Finding
from seatrial.check.judging.report import Report
from seatrial.check.reports.adapters import SCHEDULERS, Order
from seatrial.check.reports.report_table import would_refuse

SCHEMA_VERSION = 1


def document(report: Report, orders: Sequence[Order] = ()) -> dict[str, Any]:
    """`verdict`, `counts`, `nodes` (name -> verdict), `findings` (worst first), `outputs` (each file and its verdict).

    With measurements also `measured` (rates, for the planner), `rounds`, `seconds`, `blames` and `unsettled`. `orders`:
    the commands that drain failed nodes, with their results; `apply_refused`: why --apply needs --force.
    """
    check_run = {} if report.check_run is None else report.check_run.document()
    refusals = (would_refuse(report, [o for o in orders if o.scheduler == s]) for s in SCHEDULERS)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": report.verdict,
        "counts": report.counts,
        "nodes": report.nodes,
        "findings": [_finding(f) for f in report.findings],
        "outputs": [
            {
                "file": j.file,
                "node": j.node,
                "tool": j.tool or None,
                "verdict": j.verdict,
                "inventory": dict(j.inventory),
            }
            for j in report.judged
        ],
        **check_run,
        "orders": [order.document() for order in orders],
        "apply_refused": next(filter(None, refusals), None),
    }


def text(report: Report, orders: Sequence[Order] = (), *, time: float | None = None) -> str:
    """The document with a final newline, and unix `time` if given. A number that JSON cannot represent becomes null."""
    whole = document(report, orders) | ({} if time is None else {"time": time})
    return json.dumps(finite(whole), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finding(f: Finding) -> dict[str, Any]:
    return {**asdict(f), "evidence": list(f.evidence), "deviation": f.deviation}
