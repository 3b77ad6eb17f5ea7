"""`ipmitool sel list` and `elist`: the event log of the BMC.

Format: ipmitool, lib/ipmi_sel.c; the events: include/ipmitool/ipmi_sel.h. An event that is deasserted later is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Finding, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool

_RECORD = re.compile(
    r"\s*(?P<id>[0-9a-f]{1,4}) \| +(?:(?P<date>\d\d/\d\d/\d{2,4}|Pre-Init) +\|\s*(?P<time>[\d:]{8}(?: \w{3,5})?|\d{1,10}|Pre-Init)\s*\| +)?(?P<what>\S.*?)\s*"
)
_STATELESS = ("OEM record", "System Boot", "Linux")
_EMPTY = re.compile(r"SEL has no entries\s*")
# Matched against sensor and event; the first match counts.
_RULES: tuple[tuple[Verdict, str], ...] = (
    ("FAIL", r"uncorrectable (?:ecc|machine check|cpu-complex)|bus (?:uncorrectable|fatal)|fatal nmi|\bpci [ps]err\b|\bierr\b|thermal trip|critical overtemperature"),
    ("FAIL", r"non-recoverable|frb[123]/|parity$|memory device disabled|unrecoverable|undetermined system hardware failure|(?:no|no usable) system memory"),
    ("FAIL", r"bad ?pcie|fru failure|controller unavailable|processor.*\| (?:configuration error|disabled)"),
    ("WARN", r"correctable|bus degraded|bus timeout|(?:upper|lower) (?:non-)?critical|at or (?:above|below)|transition to (?:degraded|critical|non-critical|off line)"),
    ("WARN", r"failure detected|failed$|predictive failure(?! deasserted)|ac lost|ac out-of-range|config(?:uration)? error|power supply inactive|redundancy (?:lost|degraded)|insufficient resources"),
    ("WARN", r"drive fault|in (?:critical|failed) array|rebuild aborted|throttled|limit exceeded|performance lags|soft[- ]power control failure|\| low$|nmi|linux kernel panic"),
    ("WARN", r"watchdog.*\| (?:timer expired|hard reset|power (?:down|cycle))|critical stop|error during system startup|os (?:expired|nmi)|no bootable media|heartbeat lost|communication lost|sensor failure|hotswap fault|memory scrub failed|degraded or unavailable"),
    ("PASS", r"system event|event logging|system (?:boot|firmware progress|acpi)|\bos (?:boot|stop|critical stop.*graceful|shutdown)|button|session audit|version change|firmware or software change|timestamp clock sync|initiated by|boot completed|graceful|entity presence"),
    ("PASS", r"present|presence|absent|fully redundant|power off/down|power cycle|interlock|sufficient|state deasserted|deasserted|transition to (?:ok|running|active|idle|on line|power off|power save)|not exceeded|performance met|enabled|intrusion|unplugged|connected|installed|ready for|drive present|hot spare|rebuild in progress|s[0-5]/|working|soft-off|log (?:area|almost)|monitor$|informational|spare"),
)  # fmt: skip
_COMPILED = tuple((verdict, re.compile(pattern, re.IGNORECASE)) for verdict, pattern in _RULES)


@dataclass(frozen=True)
class Event:
    """One record: the sensor with its event, without time and reading."""

    line: int
    when: str
    what: str
    over: bool


@dataclass(frozen=True)
class Sel:
    """The event log of one BMC."""

    file: str
    events: tuple[Event, ...]


def parse(lines: Lines, file: str) -> Sel:
    """Parse the log. Raises ParseError if it has no record and does not state that it is empty."""
    events: list[Event] = []
    empty = False
    for number, line in lines:
        if _EMPTY.fullmatch(line):
            empty = True
        elif (found := _RECORD.fullmatch(line)) and ("|" in found["what"] or "kernel panic" in found["what"]):
            parts = [p.strip() for p in found["what"].split("|")]
            state = next((p for p in parts if p in ("Asserted", "Deasserted")), "")
            if not state and len(parts) == 2 and not parts[0].startswith(_STATELESS):
                continue  # cut off before the direction
            when = f"{found['date'] or ''} {found['time'] or ''}".strip()
            events.append(Event(number, when, " | ".join(parts[:2]), state == "Deasserted"))
        else:
            continue
        lines.claim(number)
    if not events and not empty:
        raise ParseError("no log record in the output", file=file)
    return Sel(file, tuple(events))


def judge(sel: Sel, context: Context) -> list[Finding]:
    """One finding per sensor and event that is still asserted; UNJUDGED if no rule matches."""
    add = FindingCollector(sel.file, context, "SEL001")
    open_: dict[str, list[Event]] = {}
    for event in sel.events:
        if event.over:
            open_.pop(event.what, None)
        else:
            open_.setdefault(event.what, []).append(event)
    unknown: list[Event] = []
    for what, events in open_.items():
        verdict = next((v for v, p in _COMPILED if p.search(what)), None)
        if verdict is None:
            unknown += events
        elif verdict != "PASS":
            times = f", {len(events)} times" if len(events) > 1 else ""
            text = f"{what.replace(' | ', ': ')}{times}, last {events[-1].when}"
            add(verdict, text, *(e.line for e in events))
    if unknown:
        kinds = list(dict.fromkeys(e.what.replace(" | ", ": ")[:60] for e in unknown))
        text = f"{len(unknown)} unknown log records: {'; '.join(kinds[:4])}"
        add("UNJUDGED", text, *(e.line for e in unknown))
    return add.with_pass("no asserted fault in the BMC's log")


_MATCHES = having(
    r"^\s*[0-9a-f]{1,4} \| +(?:\d\d/\d\d/\d{2,4}|Pre-Init) +\|\s*(?:[\d:]+|Pre-Init)|^SEL has no entries"
)
TOOLS: tuple[Tool[Sel], ...] = (Tool("ipmitool sel", _MATCHES, parse, judge),)
