"""A report as lines for a terminal: worst first, similar findings grouped, each action once. Pure."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.measured import lines as rate_lines
from seatrial.check.judging.report import Report
from seatrial.check.ranges import listed, natural, pieces, ranges, shortened
from seatrial.check.reports.adapters import SCHEDULERS, Order, refusal

STYLES: dict[Verdict, str] = {"FAIL": "bold red", "WARN": "yellow", "UNJUDGED": "magenta", "PASS": "green"}
_PASSES_SHOWN = 12  # lines; more than that are counted
_TARGETS_SHOWN = 8
_PLACES_SHOWN = 3
_ORDERS_SHOWN = 4
_NAMES_SHOWN = 24
_INDENT = 10

Line = tuple[str, str]  # text and style
_PORT_OF = re.compile(r"^(\d+) to (.+)$")  # a switch is stored in the field of the peer


def table(report: Report, orders: Sequence[Order] = (), *, width: int = 100) -> list[Line]:
    """Lines with their styles; the last is the verdict with its meaning. `orders` are commands that remove nodes."""
    lines: list[Line] = []
    if headline := lead(report):
        lines = [*_wrapped("", headline, width, STYLES[report.verdict], indent=0), ("", "")]
    seen: set[tuple[str, str]] = set()
    for group in groups([f for f in report.findings if f.verdict != "PASS"]):
        lines += _group(group, width, seen)
    lines += _passes([f for f in report.findings if f.verdict == "PASS"], width)
    lines += _measured(report, width)
    lines += _orders(report, orders, width)
    return [*lines, ("", ""), (conclusion(report), STYLES[report.verdict])]


def lead(report: Report) -> str:
    """The worst verdict and its nodes: "2 of 4 nodes failed: n3, n7"; without node names outputs. Empty for PASS."""
    of = report.nodes
    what, names = "node", [name for name, verdict in of.items() if verdict == report.verdict]
    if not names:
        of = {j.file: j.verdict for j in report.judged}
        what, names = "output", [name for name, verdict in of.items() if verdict == report.verdict]
    if not names or report.verdict == "PASS":
        return ""
    some = f"{len(names)} of {len(of)} {what}{'s' * (len(of) > 1)}"
    return f"{some} {_WORDS[report.verdict]}: {listed(names, _NAMES_SHOWN)}"


def conclusion(report: Report) -> str:
    """One line: the verdict, the number of findings by verdict, and what UNJUDGED alone means."""
    counts = ", ".join(f"{n} {_WORDS[v]}" for v, n in report.counts.items() if n) or "no measurements"
    text = f"{report.verdict}: {counts}{extent(report)}"
    if report.verdict == "UNJUDGED":
        text += ". Nothing failed, but not everything could be judged: this is not a pass"
    return text


def extent(report: Report) -> str:
    """What the counts refer to: " in 4 outputs of 4 nodes", " on 16 nodes in 6.1 s", " on 16 simulated nodes"."""
    count = len(report.nodes)
    nodes = f"{count} node{'s' * (count != 1)}"
    if report.check_run is None:
        of = f" in {len(report.judged)} output{'s' * (len(report.judged) != 1)}"
        return of + (f" of {nodes}" if count else "")
    if report.check_run.simulated:
        return f" on {nodes.replace(' ', ' simulated ')}"
    seconds = report.check_run.seconds.get("total")
    return f" on {nodes}" + ("" if seconds is None else f" in {seconds:.1f} s")


_WORDS: dict[Verdict, str] = {"FAIL": "failed", "WARN": "suspect", "UNJUDGED": "not judged", "PASS": "passed"}


def groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings that differ only in their target."""
    found: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        found.setdefault((f.verdict, f.code, f.message, f.action, _file(f)), []).append(f)
    return list(found.values())


def _file(f: Finding) -> str:
    """The file of a finding without a node name: only it distinguishes findings about different machines."""
    return (
        ""
        if f.target.node is not None or not f.evidence
        else f.evidence[0].rstrip("0123456789").removesuffix(":")
    )


def _group(group: Sequence[Finding], width: int, shown: set[tuple[str, str]]) -> Iterator[Line]:
    first = group[0]
    head = f"{first.verdict:<{_INDENT}}"
    yield from _wrapped(head, _group_text(group), width, STYLES[first.verdict])
    blank = " " * _INDENT
    if first.why_unjudged and first.why_unjudged not in first.message:
        yield from _wrapped(blank, f"why       {first.why_unjudged}", width)
    if first.expected is not None and (text := expected(first.expected)):
        # Without a value it only says what the measurement means.
        label = "means" if first.expected.value is None else "expected"
        yield from _wrapped(blank, f"{label:<{_INDENT}}{text}", width)
    if first.deviation is not None and first.peers_median is not None:
        yield from _wrapped(
            blank, f"peers     median {first.peers_median:.4g} {first.unit}: {first.deviation:+.0%}", width
        )
    if (seen := places(group)) and not contains_evidence(first):
        yield from _wrapped(blank, f"evidence  {seen}", width)
    if first.action:
        again = (first.code, first.action) in shown
        shown.add((first.code, first.action))
        yield from _wrapped(blank, f"action    {'as above' if again else first.action}", width)


def place(finding: Finding) -> str:
    """The target as text; a switch is stored in the field of the peer, and nothing leads "to" it."""
    text = str(finding.target)
    return text.removeprefix("to ") if finding.code.startswith(("BLM", "TOP")) else text


def message(finding: Finding) -> str:
    """The message without the target at its beginning, which is printed next to it."""
    return finding.message.removeprefix(f"{place(finding)}: ")


def contains_evidence(finding: Finding) -> bool:
    """Whether the message already contains the evidence, as that of a blame does."""
    return all(e in finding.message for e in finding.evidence)


def targets(group: Sequence[Finding]) -> str:
    """The targets of a group: "n[1-4] GPUs 0-7, n7 mlx5_2/1"; the first few, and how many more."""
    blames = any(f.code.startswith(("BLM", "TOP")) for f in group)
    whole = {f.target for f in group}
    rest: dict[str, list[str]] = {}
    for node in sorted({t.node or "" for t in whole}, key=natural):
        parts = _parts([replace(t, node=None) for t in whole if (t.node or "") == node])
        for part in [_PORT_OF.sub(r"\2 port \1", p.removeprefix("to ")) for p in parts] if blames else parts:
            rest.setdefault(part, []).append(node)
    # Merge nodes with equal targets, ordered by the first node.
    entries: list[tuple[str, int]] = []
    for part, nodes in rest.items():
        for text, count in pieces(nodes):
            entries.append((f"{text} {part}".strip(), count))
    entries.sort(key=lambda s: natural(s[0].replace("[", "")))
    entries = [s for s in entries if s[0]]
    more = sum(count for _, count in entries[_TARGETS_SHOWN:])
    return ", ".join(text for text, _ in entries[:_TARGETS_SHOWN]) + (f" and {more} more" if more else "")


def _parts(about: Sequence[Target]) -> list[str]:
    """The targets within one node: GPUs, links of a GPU and ports as ranges; "" for the node itself."""
    gpus = sorted(
        {t.gpu for t in about if t.gpu is not None and t.link is None and t.port is None and t.peer is None}
    )
    links: dict[Target, list[int]] = {}
    found: list[str] = []
    ports: list[str] = []
    for t in sorted(about, key=lambda t: natural(str(t))):
        if t.link is not None:
            links.setdefault(replace(t, link=None), []).append(t.link)
        elif t == Target(port=t.port) and t.port:
            ports.append(t.port)
        elif len(gpus) < 2 or t.gpu not in gpus:
            found.append("" if t == Target() else str(t))
    if len(gpus) > 1:
        found.append(f"GPUs {','.join(text for text, _ in ranges(gpus, least=2))}")
    for t, numbers in links.items():
        where = "" if t == Target() else f"{t} "
        several = "s" * (len(numbers) > 1)
        found.append(f"{where}NVLink{several} {','.join(x for x, _ in ranges(sorted(numbers), least=2))}")
    return found + shortened(ports)


def places(group: Sequence[Finding]) -> str:
    """Where it was seen: the first few places, and how many more."""
    every = list(dict.fromkeys(e for f in group for e in f.evidence))
    more = f" and {len(every) - _PLACES_SHOWN} more" if len(every) > _PLACES_SHOWN else ""
    return ", ".join(every[:_PLACES_SHOWN]) + more


def expected(e: Expected) -> str:
    """What was expected, as text: value, unit, meaning, source."""
    value = "" if e.value is None else e.value if isinstance(e.value, str) else f"{e.value:.6g}"
    size = "" if e.size_bytes is None else f"{e.size_bytes} bytes"
    means = ", ".join(x for x in (e.direction, e.algorithm, size) if x)
    return " ".join(
        x for x in (value, e.unit, f"({means})" if means else "", f"[{e.source}]" if e.source else "") if x
    )


def _passes(findings: Sequence[Finding], width: int) -> Iterator[Line]:
    alike = groups(findings)
    head, style = f"{'PASS':<{_INDENT}}", STYLES["PASS"]
    if len(alike) <= _PASSES_SHOWN:
        for group in alike:
            source = f" [{os.path.basename(file)}]" if (file := _file(group[0])) else ""
            yield from _wrapped(head, f"{_group_text(group)}{source}", width, style)
        return
    by_code: dict[str, list[Sequence[Finding]]] = {}
    for group in alike:
        by_code.setdefault(group[0].code, []).append(group)
    for _, same in sorted(by_code.items()):
        more = sum(map(len, same)) - len(same[0])
        text = f"{_group_text(same[0])} (and {more} more with this code)" if more else _group_text(same[0])
        yield from _wrapped(head, text, width, style)


def _group_text(group: Sequence[Finding]) -> str:
    """Code, target and message; "node7 does not answer" needs no "node7: " before it."""
    where, text = targets(group), message(group[0])
    return (
        f"{group[0].code}  {text if text.startswith(f'{where} ') else f'{where}: {text}' if where else text}"
    )


def _measured(report: Report, width: int) -> Iterator[Line]:
    """Stages with their durations, and the measured rates."""
    if report.check_run is None:
        return
    stages = [f"{stage} {duration}" for stage, duration in report.check_run.stages()]
    rates = rate_lines(report.check_run.measured)
    if stages or rates:
        yield "", ""
    if stages:
        yield from _wrapped(f"{'stages':<{_INDENT}}", "; ".join(stages), width)
    for i, text in enumerate(rates):
        yield from _wrapped(f"{'measured' if i == 0 else '':<{_INDENT}}", text, width)


def _orders(report: Report, orders: Sequence[Order], width: int) -> Iterator[Line]:
    """Whole commands, never wrapped, so that they can be copied; and whether --apply would run them."""
    for scheduler in SCHEDULERS:
        mine = [o for o in orders if o.scheduler == scheduler]
        if not mine:
            continue
        done = sum(o.done is True for o in mine)
        failed = sum(o.done is False for o in mine)
        how = "not run" if all(o.done is None for o in mine) else f"{done} done, {failed} failed"
        yield "", ""
        yield f"{'remove':<{_INDENT}}from {scheduler.capitalize()}, {how}:", ""
        for order in mine[:_ORDERS_SHOWN]:
            yield " " * _INDENT + order.text, "" if order.done is not False else "bold red"
        if len(mine) > _ORDERS_SHOWN:
            yield " " * _INDENT + f"and {len(mine) - _ORDERS_SHOWN} more, listed by --json", ""
        if why := would_refuse(report, mine):
            yield from _wrapped(" " * _INDENT, f"--apply would refuse: {why}", width)


def would_refuse(report: Report, orders: Sequence[Order]) -> str:
    """Why --apply would refuse these commands of one scheduler; empty if it would run them, or has."""
    return "" if any(o.done is not None for o in orders) else refusal(report, orders, force=False)


def _wrapped(head: str, text: str, width: int, style: str = "", indent: int = _INDENT) -> Iterator[Line]:
    clean = "".join(c if c.isprintable() else "?" for c in text)
    room = max(40, width - indent)
    for i, line in enumerate(
        textwrap.wrap(clean, room, break_long_words=False, break_on_hyphens=False) or [""]
    ):
        yield (head if i == 0 else " " * indent) + line, style if i == 0 or not indent else ""
