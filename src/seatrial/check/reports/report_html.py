"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from seatrial.check.adapters import SCHEDULERS, Order
from seatrial.check.course import Blamed
from seatrial.check.findings import Finding, Verdict, codes
from seatrial.check.measured import lines as rate_lines
from seatrial.check.ranges import shortened
from seatrial.check.report import ORDER, Report
from seatrial.check.reports.report_table import (
    conclusion,
    expected,
    groups,
    lead,
    message,
    places,
    targets,
    told_already,
    would_refuse,
)
from seatrial.check.tool import listed

_FOLDED_ROWS = 24
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#f6f7f9;--card:#fff;--line:#dfe3e8;
--fail:#c62828;--warn:#a86500;--unjudged:#7b4fb0;--pass:#2a7d46}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#9aa4af;--page:#14171b;--card:#1d2126;--line:#31373e;
--fail:#ff7b72;--warn:#e3a33b;--unjudged:#c39bf2;--pass:#63c584}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:32px 0 10px}
.soft{color:var(--soft)}.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 18px;margin:10px 0}
.head{border-left:6px solid}.FAIL{--c:var(--fail)}.WARN{--c:var(--warn)}.UNJUDGED{--c:var(--unjudged)}.PASS{--c:var(--pass)}
.head{border-left-color:var(--c)}.tag{display:inline-block;min-width:96px;color:var(--c);font-weight:700}
.counts{display:flex;gap:28px;flex-wrap:wrap;margin-top:14px}.counts b{font-size:26px;color:var(--c);display:block;line-height:1.1}
.nodes{display:flex;flex-wrap:wrap;gap:5px}.nodes .node{border:1px solid var(--c);color:var(--c);border-radius:4px;padding:1px 7px;font-size:13px}
.nodes .node.FAIL{background:var(--fail);color:var(--card);font-weight:700}
.lead{font-size:17px;font-weight:600;margin:4px 0;overflow-wrap:anywhere}
.f{border-left:4px solid var(--c)}.f p{margin:4px 0}.code{font-family:ui-monospace,monospace;font-size:13px}
dl{display:grid;grid-template-columns:86px 1fr;margin:8px 0 0;gap:3px 12px;font-size:14px}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}th{color:var(--soft);font-weight:500}td.v{white-space:nowrap}
ul{margin:6px 0 0;padding-left:20px}pre{margin:6px 0 0;white-space:pre-wrap;font:13px/1.6 ui-monospace,monospace}
details summary{cursor:pointer}details .nodes{margin-top:10px}
@media print{.card{break-inside:avoid}}
"""


def page(report: Report, orders: Sequence[Order] = (), title: str = "Seatrial check") -> str:
    """The whole document. Everything that came out of a file is escaped. `orders` take the failed nodes out."""
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: {report.verdict}</title>',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<style>{_STYLE}</style></head><body><main>",
            *_head(report, title),
            *_nodes(report),
            *_blames(report),
            *_findings(report),
            *_orders(report, orders),
            *_course(report),
            *_passes(report),
            *_outputs(report),
            "</main></body></html>",
            "",
        ]
    )


def _head(report: Report, title: str) -> Iterator[str]:
    yield f'<div class="card head {report.verdict}"><h1>{escape(title)}: <span class="tag">{report.verdict}</span></h1>'
    if said := lead(report):
        yield f'<p class="lead">{escape(said)}</p>'
    yield f'<div class="soft">{escape(conclusion(report))}</div><div class="counts">'
    words = {"FAIL": "failed", "WARN": "suspect", "UNJUDGED": "not judged", "PASS": "passed"}
    for verdict, n in report.counts.items():
        yield f'<div class="{verdict}"><b>{n}</b>{words[verdict]}</div>'
    yield "</div></div>"


def _blames(report: Report) -> Iterator[str]:
    """Who is to blame, with the evidence: what a check that measured is made for."""
    if report.course is None:
        return
    course = report.course
    if course.blames:
        yield "<h2>Who is to blame</h2>"
        yield from (_blame(b) for b in course.blames)
    elif course.unsettled:
        yield f'<h2>Who is to blame</h2><div class="card UNJUDGED f"><p>not settled: {escape(listed(course.unsettled, 24))}</p></div>'


def _blame(b: Blamed) -> str:
    why = "".join(f"<li>{escape(text)}</li>" for text in b.why)
    instead = f"<p>It could be {escape(' or '.join(b.instead))} as well.</p>" if b.instead else ""
    kind = {"gpu": "GPU", "nvlink": "NVLink", "nic": "NIC, cable or port"}.get(b.kind, b.kind)
    return (
        f'<div class="card f {b.verdict}"><p><span class="tag">{b.verdict}</span><span class="code">{b.code}</span> '
        f'<b>{escape(b.what)}</b> <span class="soft">{kind}</span></p><ul>{why}</ul>{instead}'
        f"<dl><dt>to do</dt><dd>{escape(codes()[b.code].action)}</dd></dl></div>"
    )


def _course(report: Report) -> Iterator[str]:
    """Stages, rounds and rates."""
    if report.course is None:
        return
    stages, rates = report.course.stages(), rate_lines(report.course.measured)
    if stages or rates:
        yield '<h2>What was measured</h2><div class="card"><dl>'
        yield from (f"<dt>{escape(name)}</dt><dd>{escape(took)}</dd>" for name, took in stages)
        yield "</dl><ul>" if rates else "</dl>"
        yield from (f"<li>{escape(text)}</li>" for text in rates)
        yield "</ul></div>" if rates else "</div>"


def _orders(report: Report, orders: Sequence[Order]) -> Iterator[str]:
    """The commands that drain failed nodes, and whether --apply would run them."""
    for scheduler in SCHEDULERS:
        mine = [o for o in orders if o.scheduler == scheduler]
        if mine:
            words = {None: "not carried out", True: "done", False: "failed"}
            told = "\n".join(f"{escape(o.text)}   # {words[o.done]}" for o in mine)
            yield f'<h2>To take them out of {scheduler.capitalize()}</h2><div class="card">'
            if why := would_refuse(report, mine):
                yield f"<p>--apply would refuse: {escape(why)}</p>"
            yield f"<pre>{told}</pre></div>"


def _nodes(report: Report) -> Iterator[str]:
    """Those with something against them, and the others folded where they are many."""
    if not report.nodes:
        return
    said = {verdict: [n for n, v in report.nodes.items() if v == verdict] for verdict in ORDER}
    good = said.pop("PASS")
    yield "<h2>Nodes</h2>"
    if any(said.values()):
        yield f'<div class="nodes">{"".join(_nodes_of(names, verdict) for verdict, names in said.items())}</div>'
    if good:
        yield f'<details class="card"{_open(len(good))}><summary>nothing found on {len(good)}</summary>'
        yield f'<div class="nodes">{_nodes_of(good, "PASS")}</div></details>'


def _nodes_of(names: Sequence[str], verdict: Verdict) -> str:
    return "".join(
        f'<span class="node {verdict}" title="{verdict}">{escape(n)}</span>' for n in shortened(names)
    )


def _findings(report: Report) -> Iterator[str]:
    told = set() if report.course is None else {b.target for b in report.course.blames}
    findings = [
        f
        for f in report.findings
        if f.verdict != "PASS" and not (f.target in told and f.code.startswith("BLM"))
    ]
    if findings:
        yield "<h2>What was found</h2>"
    for group in groups(findings):
        yield _finding(group)


def _finding(group: Sequence[Finding]) -> str:
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
        rows.append(("to do", f.action))
    if (seen := places(group)) and not told_already(f):
        rows.append(("seen in", seen))
    about = targets(group)
    where = f"<b>{escape(about)}</b> " if about else ""
    rows_html = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    title = escape(codes()[f.code].title)
    return (
        f'<div class="card f {f.verdict}"><p><span class="tag">{f.verdict}</span>'
        f'<span class="code">{f.code}</span> <span class="soft">{title}</span></p>'
        f"<p>{where}{escape(message(f))}</p><dl>{rows_html}</dl></div>"
    )


def _passes(report: Report) -> Iterator[str]:
    findings = [f for f in report.findings if f.verdict == "PASS"]
    if not findings:
        return
    yield f'<h2>What passed</h2><details class="card"{_open(len(findings))}>'
    yield f"<summary>{len(findings)} findings</summary><table><tr><th>code</th><th>of</th><th>what</th></tr>"
    for group in groups(findings):
        f = group[0]
        yield (
            f'<tr><td class="code v">{f.code}</td><td>{escape(targets(group))}</td><td>{escape(message(f))}</td></tr>'
        )
    yield "</table></details>"


def _open(rows: int) -> str:
    """A short list is shown, a long one is folded."""
    return ' open=""' if rows <= _FOLDED_ROWS else ""


def _outputs(report: Report) -> Iterator[str]:
    if not report.judged:
        return
    yield f'<h2>What was read</h2><details class="card"{_open(len(report.judged))}>'
    yield f"<summary>{len(report.judged)} outputs</summary><table><tr><th></th><th>node</th><th>tool</th><th>file</th></tr>"
    for j in sorted(report.judged, key=lambda j: ORDER.index(j.verdict)):
        yield (
            f'<tr><td class="v {j.verdict}"><span class="tag">{j.verdict}</span></td><td>{escape(j.node or "-")}</td>'
            f"<td>{escape(j.tool or 'unknown')}</td><td>{escape(j.file)}</td></tr>"
        )
    yield "</table></details>"
