"""A report as one line for a monitoring system: Monitoring Plugins Development Guidelines (monitoring-plugins.org)."""

from __future__ import annotations

from seatrial.check.judging.findings import Verdict
from seatrial.check.judging.report import Report
from seatrial.check.reports.report_table import extent, lead

_STATES: dict[Verdict, tuple[str, int]] = {
    "PASS": ("OK", 0),
    "WARN": ("WARNING", 1),
    "FAIL": ("CRITICAL", 2),
    "UNJUDGED": ("UNKNOWN", 3),
}
UNKNOWN = 3
_LONGEST = 1000  # characters; older NRPE truncates at 1024 bytes


def line(report: Report, *, strict: bool) -> tuple[str, int]:
    """The line and the plugin's exit code: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN. `strict`: all but OK is CRITICAL."""
    state, code = _STATES[report.verdict]
    if strict and not report.passes(strict=True):
        state, code = _STATES["FAIL"]
    counts = report.counts
    figures = " ".join(f"{v.lower()}={n}" for v, n in counts.items())
    entries = [f for f in report.findings if f.verdict == report.verdict and report.verdict != "PASS"]
    text = f"{sum(counts.values())} findings{extent(report)}"
    if entries:
        first = entries[0]
        where = "" if str(first.target) == "-" else f"{first.target} "
        more = f" (and {len(entries) - 1} more)" if len(entries) > 1 else ""
        text = f"{where}{first.code} {first.message}{more}"
        if sum(verdict == report.verdict for verdict in report.nodes.values()) > 1:
            text = f"{lead(report)}; {text}"
    return f"SEATRIAL {state} - {clean(text)} | {figures}", code


def unknown(message: str) -> str:
    """The line for a check that could not start."""
    return f"SEATRIAL UNKNOWN - {clean(message)}"


def clean(text: str) -> str:
    """One line of at most `_LONGEST` characters without "|", which begins the performance data."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).replace("|", "/").split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."
