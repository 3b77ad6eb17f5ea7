"""Recognise outputs that no reader supports, and name what to collect instead; the patterns are in unknown.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_LONGEST = 20_000  # characters to search


@dataclass(frozen=True)
class UnsupportedTool:
    """One unsupported tool and the pattern that recognises it."""

    name: str
    pattern: re.Pattern[str]
    instead: str


@cache
def unsupported_tools() -> tuple[UnsupportedTool, ...]:
    """All of unknown.toml, in its order: the first match counts."""
    table = tomllib.loads(
        files("seatrial.check.outputs").joinpath("unknown.toml").read_text(encoding="utf-8")
    )
    return tuple(
        UnsupportedTool(n, re.compile(pattern, re.MULTILINE), to) for n, (pattern, to) in table.items()
    )


def recognise_unsupported(text: str) -> UnsupportedTool | None:
    """The unsupported tool whose pattern matches; None if there is none."""
    return next((tool for tool in unsupported_tools() if tool.pattern.search(text[:_LONGEST])), None)
