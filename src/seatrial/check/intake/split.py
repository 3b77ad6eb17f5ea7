"""Split a file with several outputs where one of them certainly begins."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache

from seatrial.check.outputs import kernel_text
from seatrial.check.outputs.noise import separates
from seatrial.check.outputs.registry import recognise, tools
from seatrial.check.outputs.tool import Lines

_DECODER = json.JSONDecoder()
_DOCUMENT = re.compile(r"\{|\[\s*(?:\{|$)")
_TRIES = 50  # at incomplete JSON documents: each attempt scans to the end


@dataclass
class Part:
    """Lines that belong together, and the pattern of their tool; None if unknown."""

    by: re.Pattern[str] | None
    numbered: list[tuple[int, str]] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)  # groups `id`, `device` seen so far


def split(lines: Lines) -> tuple[list[tuple[Lines, re.Pattern[str] | None]], list[int]]:
    """The outputs in `lines`, each with the pattern of its tool, in order of their first lines.

    Also the numbers of lines where a device is repeated, by another output or by damage.

    A line can be in two parts, of which one will claim it. Lines before the first output, and between outputs, form
    parts of their own, which a reader may still recognise.
    """
    parts: list[Part] = []
    logs: dict[re.Pattern[str], Part] = {}
    log: Part | None = None  # the log of the previous line, which may continue here
    now: Part | None = None
    open_: dict[re.Pattern[str], Part] = {}  # the last output of each tool, which may continue after another
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
                now.by = begins.re  # lines before an output may belong to it
            elif now is None or now.by is not begins.re or keys & now.seen:
                twice = {kind for kind, _ in keys & (now.seen if now is not None else set())}
                again += [number] if twice == {"device"} else []
                before = open_.get(begins.re)
                if before is None or before is now or "id" in begins.re.groupindex or keys & before.seen:
                    before = Part(begins.re)
                    parts.append(before)
                now = before
            open_[begins.re] = now
            now.seen |= keys
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
    return tuple(tool.log_line for tool in tools() if tool.log_line is not None)


@cache
def _beginnings() -> tuple[re.Pattern[str], tuple[re.Pattern[str], ...]]:
    """A combined pattern as a fast test, and all `first_line` patterns, each once."""
    every = tuple(dict.fromkeys(tool.first_line for tool in tools() if tool.first_line is not None))
    return re.compile("|".join(f"(?:{re.sub('[?]P<(?:id|device)>', '?:', p.pattern)})" for p in every)), every


def _beginning(line: str) -> re.Match[str] | None:
    quick, every = _beginnings()
    return next((m for p in every if (m := p.match(line))), None) if quick.match(line) else None
