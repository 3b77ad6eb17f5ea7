"""What a text looks like that no reader knows, and what to collect instead: unknown.toml, as data."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_LONGEST = 20_000  # characters that are looked at


@dataclass(frozen=True)
class Look:
    """One tool that is known by its looks alone."""

    name: str
    pattern: re.Pattern[str]
    instead: str


@cache
def looks() -> tuple[Look, ...]:
    """All of them, in the order of the file: the first that fits counts."""
    table = tomllib.loads(files("seatrial.check").joinpath("unknown.toml").read_text(encoding="utf-8"))
    return tuple(Look(n, re.compile(pattern, re.MULTILINE), to) for n, (pattern, to) in table.items())


def looks_like(text: str) -> Look | None:
    """The tool that this looks like; None if it is like none."""
    return next((look for look in looks() if look.pattern.search(text[:_LONGEST])), None)
