"""The outputs that stand in one file, cut where one of them begins for certain, and what belongs to no output at all."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache

from seatrial.check.noise import separates
from seatrial.check.outputs import kernel_text
from seatrial.check.registry import recognise, tools
from seatrial.check.tool import Lines

_DECODER = json.JSONDecoder()
_DOCUMENT = re.compile(r"\{|\[\s*(?:\{|$)")
_TRIES = 50  # at documents that are not whole: each is read to its end


@dataclass
class Part:
    """Lines that belong together, and the pattern of the tool whose they are; None where nothing says it."""

    by: re.Pattern[str] | None
    numbered: list[tuple[int, str]] = field(default_factory=list)
    begun: set[tuple[str, str]] = field(default_factory=set)  # what only one output has, or one device


def split(lines: Lines) -> tuple[list[tuple[Lines, re.Pattern[str] | None]], list[int]]:
    """The outputs in `lines` with the pattern of their tool, in the order in which they begin. And where a device comes for the
    second time: of another output, or by damage.

    A line can be in two parts: one of them knows it. Lines before the first output, and after what ends one, are parts of
    their own: a reader may know them all the same.
    """
    parts: list[Part] = []
    logs: dict[re.Pattern[str], Part] = {}
    log: Part | None = None  # whose line was the last, and may go on in this one
    now: Part | None = None
    open_: dict[re.Pattern[str], Part] = {}  # the last output of each tool, which may go on behind another
    again: list[int] = []
    ends, place, tries = 0, 0, _TRIES
    for number, line in lines.whole:
        if place >= ends and tries and _DOCUMENT.match(line):
            log, now = None, Part(None)
            parts.append(now)
            try:
                ends = _DECODER.raw_decode(lines.text, place)[1]
            except (ValueError, RecursionError):
                tries -= 1
        inside, place = place < ends, place + len(line) + 1
        if inside and now is not None:
            now.numbered.append((number, line))
            now = now if place < ends else None
            continue
        if (each := next((p for p in _logs() if p.match(line)), None)) is not None:
            if each not in logs:
                logs[each] = Part(each)
                parts.append(logs[each])
            log = logs[each]
            log.numbered.append((number, line))
            continue
        if separates(line):
            now = log = None
            open_ = {}
            continue
        if (begins := _beginning(line)) is not None:
            log = None
            keys = {(kind, key) for kind, key in begins.groupdict().items() if key is not None}
            if now is not None and now.by is None and not recognise("\n".join(x for _, x in now.numbered)):
                now.by = begins.re  # what stands before an output may be its own
            elif now is None or now.by is not begins.re or keys & now.begun:
                twice = {kind for kind, _ in keys & (now.begun if now is not None else set())}
                again += [number] if twice == {"device"} else []
                before = open_.get(begins.re)
                if before is None or before is now or "id" in begins.re.groupindex or keys & before.begun:
                    before = Part(begins.re)
                    parts.append(before)
                now = before
            open_[begins.re] = now
            now.begun |= keys
        elif log is not None and line.strip():
            log.numbered.append((number, line))
        else:
            log = None
        if now is None:
            now = Part(None)
            parts.append(now)
        now.numbered.append((number, line))
    found = []
    for part in parts:
        passed = lines.passed if part.by is kernel_text.LINE else 0
        if any(line.strip() for _, line in part.numbered):
            found.append((Lines(part.numbered, passed, lines.repeated), part.by))
    return found, again


@cache
def _logs() -> tuple[re.Pattern[str], ...]:
    return tuple(tool.each for tool in tools() if tool.each is not None)


@cache
def _beginnings() -> tuple[re.Pattern[str], tuple[re.Pattern[str], ...]]:
    """One pattern that tells quickly whether a line is any beginning, and all of them, each once."""
    every = tuple(dict.fromkeys(tool.begins for tool in tools() if tool.begins is not None))
    return re.compile("|".join(f"(?:{re.sub('[?]P<(?:id|device)>', '?:', p.pattern)})" for p in every)), every


def _beginning(line: str) -> re.Match[str] | None:
    quick, every = _beginnings()
    return next((m for p in every if (m := p.match(line))), None) if quick.match(line) else None
