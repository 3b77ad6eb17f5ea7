"""The outputs that stand in one file, cut where one of them begins for certain, and what belongs to no output at all."""

from __future__ import annotations

import json
import re
from functools import cache

from seatrial.check.noise import separates
from seatrial.check.registry import recognise, tools
from seatrial.check.tool import Lines

_DECODER = json.JSONDecoder()
_DOCUMENT = re.compile(r"\{|\[\s*(?:\{|$)")
_TRIES = 50  # at documents that are not whole: each is read to its end


def split(lines: Lines) -> list[Lines]:
    """The outputs in `lines`, in the order in which they begin. A line can be in two of them: one of them knows it.

    Lines before the first output, and after what ends one, are parts of their own: a reader may know them all the same.
    """
    parts: list[list[tuple[int, str]]] = []
    logs: dict[re.Pattern[str], list[tuple[int, str]]] = {}
    log: list[tuple[int, str]] | None = None  # whose line was the last, and may go on in this one
    now: list[tuple[int, str]] | None = None
    of: re.Pattern[str] | None = None  # whose beginning `now` has
    seen: set[str] = set()
    ends, place, tries = 0, 0, _TRIES
    for number, line in lines.whole:
        if place >= ends and tries and _DOCUMENT.match(line):
            now, of, log = [], None, None
            parts.append(now)
            try:
                ends = _DECODER.raw_decode(lines.text, place)[1]
            except (ValueError, RecursionError):
                tries -= 1
        inside = place < ends
        place += len(line) + 1
        if inside:
            assert now is not None
            now.append((number, line))
            if place >= ends:
                now = None
            continue
        if (each := next((p for p in _logs() if p.match(line)), None)) is not None:
            if each not in logs:
                logs[each] = []
                parts.append(logs[each])
            log = logs[each]
            log.append((number, line))
            continue
        if separates(line):
            now = of = log = None
            continue
        if (begins := _beginning(line)) is not None:
            key = begins.groupdict().get("id")
            if now is not None and of is None and not recognise("\n".join(x for _, x in now)):
                of, seen = begins.re, set()  # what stands before an output may be its own
            elif begins.re is not of or key in seen:
                now, of, seen = [], begins.re, set()
                parts.append(now)
            if key is not None:
                seen.add(key)
            log = None
        elif log is not None and line.strip():
            log.append((number, line))
        else:
            log = None
        if now is None:
            now, of = [], None
            parts.append(now)
        now.append((number, line))
    kernel = [logs[p] for p in logs]
    return [
        Lines(p, lines.passed if kernel and p is kernel[0] else 0)
        for p in parts
        if any(x.strip() for _, x in p)
    ]


@cache
def _logs() -> tuple[re.Pattern[str], ...]:
    return tuple(tool.each for tool in tools() if tool.each is not None)


@cache
def _beginnings() -> tuple[re.Pattern[str], tuple[re.Pattern[str], ...]]:
    """One pattern that tells quickly whether a line is any beginning, and all of them, each once."""
    every = tuple(dict.fromkeys(tool.begins for tool in tools() if tool.begins is not None))
    return re.compile("|".join(f"(?:{p.pattern.replace('?P<id>', '?:')})" for p in every)), every


def _beginning(line: str) -> re.Match[str] | None:
    quick, every = _beginnings()
    return next((m for p in every if (m := p.match(line))), None) if quick.match(line) else None
