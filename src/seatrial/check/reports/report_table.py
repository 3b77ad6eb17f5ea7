"""A report as lines for a person: the worst first, like things together, what to do once. Pure."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from seatrial.check.adapters import SCHEDULERS, Order
from seatrial.check.findings import Expected, Finding, Verdict
from seatrial.check.measured import lines as rate_lines
from seatrial.check.report import Report, natural

STYLES: dict[Verdict, str] = {"FAIL": "bold red", "WARN": "yellow", "UNJUDGED": "magenta", "PASS": "green"}
_PASSES_SHOWN = 12  # lines; more than that are counted
_TARGETS_SHOWN = 8
_PLACES_SHOWN = 3
_ORDERS_SHOWN = 4
_NAMES_SHOWN = 24
_INDENT = 10

Line = tuple[str, str]  # text and style


def table(report: Report, orders: Sequence[Order] = (), *, width: int = 100) -> list[Line]:
    """Lines with their styles. The last one is the verdict with its meaning. `orders` take the failed nodes out."""
    lines: list[Line] = []
    told: set[tuple[str, str]] = set()
    for group in groups([f for f in report.findings if f.verdict != "PASS"]):
        lines += _group(group, width, told)
    lines += _passes([f for f in report.findings if f.verdict == "PASS"], width)
    lines += _measured(report, width)
    bad = [name for name, verdict in report.nodes.items() if verdict == "FAIL"]
    if bad:
        more = f" and {len(bad) - _NAMES_SHOWN} more" if len(bad) > _NAMES_SHOWN else ""
        text = f"{len(bad)} of {len(report.nodes)} failed: {', '.join(bad[:_NAMES_SHOWN])}{more}"
        lines += [("", ""), *_wrapped(f"{'nodes':<{_INDENT}}", text, width, "bold red")]
    lines += _orders(orders)
    return [*lines, ("", ""), (conclusion(report), STYLES[report.verdict])]


def conclusion(report: Report) -> str:
    """One line: the verdict, how many of each, and what UNJUDGED alone means."""
    counts = ", ".join(f"{n} {_WORDS[v]}" for v, n in report.counts.items() if n) or "nothing measured"
    text = f"{report.verdict}: {counts}{extent(report)}"
    if report.verdict == "UNJUDGED":
        text += ". Nothing failed, but not everything could be judged: this is no pass"
    return text


def extent(report: Report) -> str:
    """What the counts are of: " in 4 outputs of 4 nodes", " on 16 nodes in 6.1 s", " on 16 simulated nodes"."""
    count = len(report.nodes)
    nodes = f"{count} node{'s' * (count != 1)}"
    if report.course is None:
        of = f" in {len(report.judged)} output{'s' * (len(report.judged) != 1)}"
        return of + (f" of {nodes}" if count else "")
    if report.course.simulated:
        return f" on {nodes.replace(' ', ' simulated ')}"
    seconds = report.course.seconds.get("total")
    return f" on {nodes}" + ("" if seconds is None else f" in {seconds:.1f} s")


_WORDS: dict[Verdict, str] = {"FAIL": "failed", "WARN": "suspect", "UNJUDGED": "not judged", "PASS": "passed"}


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ in the place only, together."""
    found: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        found.setdefault((f.verdict, f.code, f.message, f.action, _file(f)), []).append(f)
    return list(found.values())


def _file(f: Finding) -> str:
    """The file of a finding about no named node: what else tells it from one about another machine."""
    return (
        ""
        if f.target.node is not None or not f.evidence
        else f.evidence[0].rstrip("0123456789").removesuffix(":")
    )


def _group(group: Sequence[Finding], width: int, told: set[tuple[str, str]]) -> Iterator[Line]:
    first = group[0]
    where = targets(group)
    head = f"{first.verdict:<{_INDENT}}"
    says = message(first)
    if not says.startswith(f"{where} "):  # "node7 does not answer" needs no "node7: " before it
        says = f"{where}{': ' if where else ''}{says}"
    text = f"{first.code}  {says}"
    yield from _wrapped(head, text, width, STYLES[first.verdict])
    blank = " " * _INDENT
    if first.why_unjudged and first.why_unjudged not in first.message:
        yield from _wrapped(blank, f"why       {first.why_unjudged}", width)
    if first.expected is not None and (says := expected(first.expected)):
        # Without a value it only says what the measurement means.
        label = "means" if first.expected.value is None else "expected"
        yield from _wrapped(blank, f"{label:<{_INDENT}}{says}", width)
    if first.deviation is not None and first.peers_median is not None:
        yield from _wrapped(
            blank, f"peers     median {first.peers_median:.4g} {first.unit}: {first.deviation:+.0%}", width
        )
    if (seen := places(group)) and not told_already(first):
        yield from _wrapped(blank, f"seen in   {seen}", width)
    # What was measured and could not be judged is no trouble yet.
    idle = first.verdict == "UNJUDGED" and first.measured is not None
    if first.action and not idle and (first.code, first.action) not in told:
        told.add((first.code, first.action))
        yield from _wrapped(blank, f"to do     {first.action}", width)


def place(finding: Finding) -> str:
    """What it is about; a switch stands in the peer's place, and nothing leads "to" it."""
    text = str(finding.target)
    return text.removeprefix("to ") if finding.code.startswith(("BLM", "TOP")) else text


def message(finding: Finding) -> str:
    """Its message without the place that it begins with, which stands beside it."""
    return finding.message.removeprefix(f"{place(finding)}: ")


def told_already(finding: Finding) -> bool:
    """Whether the evidence stands in the message, as it does where somebody is blamed."""
    return all(e in finding.message for e in finding.evidence)


def targets(group: Sequence[Finding]) -> str:
    """What a group is about: the first few, and how many more."""
    names = sorted({place(f) for f in group} - {"-"}, key=natural)
    more = f" and {len(names) - _TARGETS_SHOWN} more" if len(names) > _TARGETS_SHOWN else ""
    return ", ".join(names[:_TARGETS_SHOWN]) + more


def places(group: Sequence[Finding]) -> str:
    """Where it was seen: the first few places, and how many more."""
    every = list(dict.fromkeys(e for f in group for e in f.evidence))
    more = f" and {len(every) - _PLACES_SHOWN} more" if len(every) > _PLACES_SHOWN else ""
    return ", ".join(every[:_PLACES_SHOWN]) + more


def expected(e: Expected) -> str:
    """What was expected, in words: value, unit, what it means, who says so."""
    value = "" if e.value is None else e.value if isinstance(e.value, str) else f"{e.value:.6g}"
    size = "" if e.size_bytes is None else f"{e.size_bytes} bytes"
    means = ", ".join(x for x in (e.direction, e.algorithm, size) if x)
    return " ".join(
        x for x in (value, e.unit, f"({means})" if means else "", f"[{e.source}]" if e.source else "") if x
    )


def _passes(findings: Sequence[Finding], width: int) -> Iterator[Line]:
    if len(findings) <= _PASSES_SHOWN:
        for f in findings:
            where = "" if str(f.target) == "-" else f"{f.target}: "
            source = f" [{os.path.basename(file)}]" if (file := _file(f)) else ""
            text = f"{f.code}  {where}{f.message}{source}"
            yield from _wrapped(f"{'PASS':<{_INDENT}}", text, width, STYLES["PASS"])
        return
    by_code: dict[str, list[Finding]] = {}
    for f in findings:
        by_code.setdefault(f.code, []).append(f)
    for code, alike in sorted(by_code.items()):
        where = "" if str(alike[0].target) == "-" else f"{place(alike[0])}: "
        more = f" (and {len(alike) - 1} more of this code)" if len(alike) > 1 else ""
        text = f"{code}  {where}{message(alike[0])}{more}"
        yield from _wrapped(f"{'PASS':<{_INDENT}}", text, width, STYLES["PASS"])


def _measured(report: Report, width: int) -> Iterator[Line]:
    """How long it took, and what was read."""
    if report.course is None:
        return
    stages = [f"{stage} {took}" for stage, took in report.course.stages()]
    rates = rate_lines(report.course.measured)
    if stages or rates:
        yield "", ""
    if stages:
        yield from _wrapped(f"{'stages':<{_INDENT}}", "; ".join(stages), width)
    for i, text in enumerate(rates):
        yield from _wrapped(f"{'measured' if i == 0 else '':<{_INDENT}}", text, width)


def _orders(orders: Sequence[Order]) -> Iterator[Line]:
    """Whole commands, never wrapped: they are to be copied."""
    for scheduler in SCHEDULERS:
        mine = [o for o in orders if o.scheduler == scheduler]
        if not mine:
            continue
        done = sum(o.done is True for o in mine)
        failed = sum(o.done is False for o in mine)
        how = "not carried out" if all(o.done is None for o in mine) else f"{done} done, {failed} failed"
        yield "", ""
        yield f"{'take out':<{_INDENT}}of {scheduler.capitalize()}, {how}:", ""
        for order in mine[:_ORDERS_SHOWN]:
            yield " " * _INDENT + order.text, "" if order.done is not False else "bold red"
        if len(mine) > _ORDERS_SHOWN:
            yield " " * _INDENT + f"and {len(mine) - _ORDERS_SHOWN} more, which --json lists", ""


def _wrapped(head: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    clean = "".join(c if c.isprintable() else "?" for c in text)
    room = max(40, width - _INDENT)
    for i, line in enumerate(
        textwrap.wrap(clean, room, break_long_words=False, break_on_hyphens=False) or [""]
    ):
        yield (head if i == 0 else " " * _INDENT) + line, style if i == 0 else ""
