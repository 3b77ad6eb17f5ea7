"""`dcgmi health -c`, as a table or with -j: results of DCGM's background health watches.

Format: NVIDIA/DCGM, dcgmi/Health.cpp and DcgmiOutput.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from seatrial.check.judging.findings import Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, read_json

_ROW = re.compile(r"\|(?P<depth> *(?:-> )?) ?(?P<name>[^|]*?)\s*\|\s*(?P<value>[^|]*?)\s*\|\s*")
_TITLE = re.compile(r"\|\s*Health Monitor Report\s*\|\s*")
_OLD = re.compile(r"\|\s*(?P<name>Overall Health): *(?P<value>\w[\w ]*?)\s*\|\s*")  # DCGM 1: in one cell
_ERROR = re.compile(r"Error: .*")
_WORDS: dict[str, Verdict] = {"Healthy": "PASS", "Warning": "WARN", "Failure": "FAIL"}


@dataclass
class Entry:
    """One entry of the tree: its path ("GPU", "0", "Errors", "PCIe system"), its value, and further text."""

    path: tuple[str, ...]
    value: str
    line: int | None
    more: str = ""


@dataclass(frozen=True)
class Health:
    """The whole report. `error`: the message that dcgmi printed instead, with its line."""

    file: str
    entries: tuple[Entry, ...]
    error: tuple[str, int] | None = None


def parse(lines: Lines, file: str) -> Health:
    """Parse the report. Raises ParseError if the overall health is missing, or the table is cut off."""
    error: tuple[str, int] | None = None
    if "{" in lines.text and "|" not in lines.text.partition("{")[0]:
        document = read_json(lines, file)
        entries = list(_walk((), document.get("body") if isinstance(document, dict) else None))
    else:
        entries, rules = [], 0
        for number, line in lines:
            if _ERROR.fullmatch(line):
                error = (line.strip(), number)
            elif old := _OLD.fullmatch(line):
                entries.append(Entry((old["name"],), old["value"], number))
            elif (row := _ROW.fullmatch(line)) and rules > 1:
                _add(entries, row, number)
            elif re.fullmatch(r"\+[-=+]+\+\s*", line):
                rules += 1
            elif not _TITLE.fullmatch(line):
                continue
            lines.claim(number)
        if rules < 3 and error is None:
            raise ParseError("the table is incomplete: truncated", file=file)
    if error is None and ("Overall Health",) not in {e.path for e in entries}:
        raise ParseError("no overall health in the output", file=file)
    return Health(file, tuple(entries), error)


def _add(entries: list[Entry], row: re.Match[str], number: int) -> None:
    if not row["name"]:
        if entries:
            entries[-1].more = f"{entries[-1].more} {row['value']}".strip()
        return
    depth = len(row["depth"]) // 3 if "->" in row["depth"] else 0
    above = entries[-1].path[:depth] if entries else ()
    entries.append(Entry((*above, row["name"]), row["value"], number))


def _walk(path: tuple[str, ...], children: Any) -> Iterator[Entry]:
    for name, child in children.items() if isinstance(children, dict) else ():
        if isinstance(child, dict):
            more = child.get("overflow")
            words = " ".join(map(str, more)) if isinstance(more, list) else ""
            yield Entry((*path, str(name)), str(child.get("value") or ""), None, words)
            yield from _walk((*path, str(name)), child.get("children"))


def judge(health: Health, context: Context) -> list[Finding]:
    """Systems that warn or fail; UNJUDGED for unknown words and for watches that are off."""
    add = FindingCollector(health.file, context, "DIA005")
    if health.error is not None:
        add("UNJUDGED", health.error[0][:200], health.error[1], code="DIA002")
    long = [e.path for e in health.entries if len(e.path) > 3]
    for entry in health.entries:
        *around, name = entry.path
        verdict = _WORDS.get(entry.value, "UNJUDGED")
        summed = len(entry.path) < 4 and any(p[: len(entry.path)] == entry.path for p in long)
        if verdict == "PASS" or not entry.value or not around or (summed and verdict != "UNJUDGED"):
            continue
        on_gpu = around[0] == "GPU" and len(around) > 1 and around[1].isdecimal()
        text = f"{name if on_gpu else ' '.join((*around[:2], name))}: {entry.value}"
        text = f"{text}; {entry.more}"[:400] if entry.more else text
        add(verdict, text, entry.line, target=Target(gpu=int(around[1]) if on_gpu else None))
    overall = next((e.value for e in health.entries if e.path == ("Overall Health",)), "Healthy")
    verdict = _WORDS.get(overall, "UNJUDGED")
    if verdict not in {"PASS", *(f.verdict for f in add.found)}:
        add(verdict, f"overall health: {overall}"[:80])
    return add.with_pass("DCGM's health watches report no faults")


_MATCHES = having(
    r"^\|\s*(?:Health Monitor Report|Overall Health:)|\"Health Monitor Report\"|^Error: (?:Health watches not enabled|Unable to check health watches)"
)
TOOLS: tuple[Tool[Health], ...] = (Tool("dcgmi health", _MATCHES, parse, judge),)
