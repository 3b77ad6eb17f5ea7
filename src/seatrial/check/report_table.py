"""A report as lines for a person: the worst first, like things together, what to do once. Pure."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from seatrial.check.findings import Expected, Finding, Verdict, codes
from seatrial.check.report import Report, natural

STYLES: dict[Verdict, str] = {"FAIL": "bold red", "WARN": "yellow", "UNJUDGED": "magenta", "PASS": "green"}
_PASSES_SHOWN = 12  # lines; more than that are counted
_TARGETS_SHOWN = 8
_PLACES_SHOWN = 3
_INDENT = 10

Line = tuple[str, str]  # text and style


def table(report: Report, *, width: int = 100) -> list[Line]:
    """Lines with their styles. The last one is the verdict with its meaning."""
    lines: list[Line] = []
    told: set[tuple[str, str]] = set()
    for group in groups([f for f in report.findings if f.verdict != "PASS"]):
        lines += _group(group, width, told)
    lines += _passes([f for f in report.findings if f.verdict == "PASS"], width)
    bad = [name for name, verdict in report.nodes.items() if verdict == "FAIL"]
    if bad:
        lines += [("", "")]
        lines += _wrapped(
            f"{'nodes':<{_INDENT}}",
            f"{len(bad)} of {len(report.nodes)} failed: {', '.join(bad)}",
            width,
            "bold red",
        )
    return [*lines, ("", ""), (conclusion(report), STYLES[report.verdict])]


def conclusion(report: Report) -> str:
    """One line: the verdict, how many of each, and what UNJUDGED alone means."""
    counts = ", ".join(f"{n} {_WORDS[v]}" for v, n in report.counts.items() if n)
    of = f"{len(report.judged)} output{'s' * (len(report.judged) != 1)}"
    nodes = f" of {len(report.nodes)} node{'s' * (len(report.nodes) != 1)}" if report.nodes else ""
    text = f"{report.verdict}: {counts} in {of}{nodes}"
    if report.verdict == "UNJUDGED":
        text += ". Nothing failed, but not everything could be judged: this is no pass"
    return text


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
    text = f"{first.code}  {where}{': ' if where else ''}{first.message}"
    yield from _wrapped(head, text, width, STYLES[first.verdict])
    blank = " " * _INDENT
    if first.expected is not None and (says := expected(first.expected)):
        yield from _wrapped(blank, f"expected  {says}", width)
    if first.deviation is not None and first.peers_median is not None:
        yield from _wrapped(
            blank, f"peers     median {first.peers_median:.4g} {first.unit}: {first.deviation:+.0%}", width
        )
    if seen := places(group):
        yield from _wrapped(blank, f"seen in   {seen}", width)
    if first.action and (first.code, first.action) not in told:
        told.add((first.code, first.action))
        yield from _wrapped(blank, f"to do     {first.action}", width)


def targets(group: Sequence[Finding]) -> str:
    """What a group is about: the first few, and how many more."""
    names = sorted({str(f.target) for f in group} - {"-"}, key=natural)
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
    by_code: dict[str, int] = {}
    for f in findings:
        by_code[f.code] = by_code.get(f.code, 0) + 1
    for code, n in sorted(by_code.items()):
        text = f"{code}  {n} times nothing wrong with it: {codes()[code].title}"
        yield from _wrapped(f"{'PASS':<{_INDENT}}", text, width, STYLES["PASS"])


def _wrapped(head: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    clean = "".join(c if c.isprintable() else "?" for c in text)
    room = max(40, width - _INDENT)
    for i, line in enumerate(
        textwrap.wrap(clean, room, break_long_words=False, break_on_hyphens=False) or [""]
    ):
        yield (head if i == 0 else " " * _INDENT) + line, style if i == 0 else ""
