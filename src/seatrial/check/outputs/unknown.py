"""Recognise outputs that no reader supports, and say what to collect instead; the patterns are in unknown.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_LONGEST = 20_000  # characters to search


@dataclass(frozen=True)
class Look:
    """One unsupported tool and the pattern that recognises it."""

    name: str
    pattern: re.Pattern[str]
    instead: str


@cache
def looks() -> tuple[Look, ...]:
    """In file order: the first match counts."""
    table = tomllib.loads(
        files("seatrial.check.outputs").joinpath("unknown.toml").read_text(encoding="utf-8")
    )
    return tuple(Look(n, re.compile(pattern, re.MULTILINE), to) for n, (pattern, to) in table.items())


def looks_like(text: str) -> Look | None:
    """The tool whose pattern matches; None if there is none."""
    return next((look for look in looks() if look.pattern.search(text[:_LONGEST])), None)
