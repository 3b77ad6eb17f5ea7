"""The log of NVIDIA's fabric manager: errors of NVSwitches and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.hardware.xid import address

_LINE = re.compile(
    r"^\[(?P<time>[A-Z][a-z]{2} [ 0-9][0-9] [0-9]{4} [0-9:]{8})\] \[(?P<level>[A-Z]{4,8})\] \[tid (?P<tid>[0-9]+)\] (?P<text>.*)$"
)
# A message continues on a line without its own header.
_PAYLOAD = re.compile(r"Message payload details:")
_SWITCH = re.compile(
    r"NVSwitch (?P<severity>non-fatal|fatal) error (?P<code>[0-9]{1,6}) .*?pci bus id (?P<pci>[0-9A-Fa-f:.]{7,20})(?: physical id [0-9]+)?(?: port (?P<port>[0-9]{1,3}))?",
    re.IGNORECASE,
)
# The GPU side of NVLink 5, reported by the fabric manager; the lines that follow name the GPU.
_FATAL = re.compile(r"(?<!non-)(?<!non)(?<!non )\bfatal error\b", re.IGNORECASE)
_LEVELS = ("INFO", "DEBUG", "NOTICE", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL")


@dataclass(frozen=True)
class Entry:
    """One message above the informational levels."""

    line: int
    time: str
    level: str
    text: str


@dataclass(frozen=True)
class FabricLog:
    """The relevant content of the log."""

    file: str
    lines: int
    entries: tuple[Entry, ...]


def parse(lines: Lines, file: str) -> FabricLog:
    """Parse the log. Raises ParseError if no line is the fabric manager's."""
    entries = []
    count = 0
    for number, line in lines:
        if found := _LINE.match(line):
            count += 1
            if found["level"] not in _LEVELS:
                continue
            if found["level"] not in ("INFO", "DEBUG", "NOTICE"):
                entries.append(Entry(number, found["time"], found["level"], found["text"].strip()))
        elif not (count and _PAYLOAD.match(line)):
            continue
        lines.claim(number)
    if not count:
        raise ParseError("no line of the fabric manager", file=file)
    return FabricLog(file, count, tuple(entries))


def judge(log: FabricLog, context: Context) -> list[Finding]:
    """One finding per kind of message; one PASS if there is none."""
    add = FindingCollector(log.file, context, "NVL007")
    groups: dict[tuple[Verdict, Target, str], list[Entry]] = {}
    for entry in log.entries:
        switch = _SWITCH.search(entry.text)
        if switch is not None:
            verdict: Verdict = "WARN" if switch["severity"].lower() == "non-fatal" else "FAIL"
            target = Target(
                pci=address(switch["pci"]), link=None if switch["port"] is None else int(switch["port"])
            )
            what = f"NVSwitch {switch['severity'].lower()} error {switch['code']}"
        else:
            # Not stated to be fatal: WARN. A fabric that was never set up shows in the GPUs' fabric state.
            bad = entry.level in ("CRITICAL", "FATAL") or _FATAL.search(entry.text) is not None
            verdict, target, what = "FAIL" if bad else "WARN", Target(), entry.text[:200]
        groups.setdefault((verdict, target, what), []).append(entry)
    for (verdict, target, what), same in groups.items():
        times = f", {len(same)} times, the last" if len(same) > 1 else ""
        add(verdict, f"{what}{times} at {same[-1].time}", *(e.line for e in same), target=target)
    return add.with_pass(f"no error in {log.lines} messages of the fabric manager", code="NVL008")


TOOLS: tuple[Tool[FabricLog], ...] = (
    Tool("fabric manager log", having(_LINE.pattern), parse, judge, log_line=_LINE),
)
