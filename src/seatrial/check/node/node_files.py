"""Small files of /proc and /sys, read as what they say. What is not there, or may not be read, is None."""

from __future__ import annotations

from pathlib import Path

FACTS_VERSION = (
    1  # of what node_stage.measure() tells: another is of another seatrial, and none of ours to read
)
_LARGEST_BYTES = 1 << 20  # /proc/cpuinfo of 512 processors


def text_of(path: Path) -> str | None:
    """The file's text without space around it; None if it cannot be read."""
    try:
        with path.open("rb") as f:
            return f.read(_LARGEST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> int | None:
    """The whole number that the file holds; None if it holds none ("max") or cannot be read."""
    text = text_of(path)
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def fields_of(path: Path) -> dict[str, str]:
    """Lines "name: value" or "name=value" (quotes taken off), the first of each name; empty if it cannot be read."""
    found: dict[str, str] = {}
    for line in (text_of(path) or "").splitlines():
        at = min((i for c in ":=" if (i := line.find(c)) >= 0), default=-1)
        if at > 0:
            found.setdefault(line[:at].strip(), line[at + 1 :].strip().strip('"'))
    return found
