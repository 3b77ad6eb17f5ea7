"""Numbers, and names that differ in a number, as ranges: "0-7", "n[1-3]", "mlx5_[0-7]/1"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The last number of a name, or the one before a port ("/1").
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>[0-9]{1,18})(?P<suffix>/[0-9]+)?")
_LEAST = 3  # shorter runs are easier to read as single numbers


def ranges(numbers: Iterable[int], width: int = 0, least: int = _LEAST) -> list[tuple[str, int]]:
    """Group ascending numbers: runs of at least `least` as ("4-7", 4), others as ("4", 1); padded to `width` digits."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [part for run in runs for part in ([run] if len(run) >= least else [[n] for n in run])]
    return [("-".join(f"{n:0{width}d}" for n in dict.fromkeys((p[0], p[-1]))), len(p)) for p in parts]


def numbered(names: Iterable[str]) -> tuple[list[str], dict[tuple[str, str, int], list[int]]]:
    """Split names into those without a number, and (prefix, suffix, width) -> ascending numbers; each name once.

    "node7" and "node07" are two hosts: width is the number of digits if some number of that length has a leading zero,
    else 0.
    """
    plain: list[str] = []
    split: list[tuple[str, str, str]] = []
    for name in dict.fromkeys(names):
        if (match := _NUMBERED.fullmatch(name)) is None:
            plain.append(name)
        else:
            split.append((match["prefix"], match["suffix"] or "", match["number"]))
    padded = {(p, s, len(digits)) for p, s, digits in split if digits[0] == "0" and len(digits) > 1}
    found: dict[tuple[str, str, int], list[int]] = {}
    for prefix, suffix, digits in split:
        width = len(digits) if (prefix, suffix, len(digits)) in padded else 0
        found.setdefault((prefix, suffix, width), []).append(int(digits))
    return plain, {key: sorted(numbers) for key, numbers in found.items()}


def pieces(names: Iterable[str]) -> list[tuple[str, int]]:
    """The names in order, consecutive ones as "n[1-3]", each with the number of names it covers."""
    plain, groups = numbered(names)
    found = [(name, 1) for name in plain]
    for (prefix, suffix, width), numbers in groups.items():
        # A numeric prefix ("25.781") is a value, not a name.
        for text, count in ranges(numbers, width, _LEAST if prefix[:1].isalpha() else len(numbers) + 1):
            found.append((f"{prefix}[{text}]{suffix}" if count > 1 else f"{prefix}{text}{suffix}", count))
    return sorted(found, key=lambda piece: natural(piece[0].replace("[", "")))


def shortened(names: Sequence[str]) -> list[str]:
    """pieces() without the counts."""
    return [text for text, _ in pieces(names)]


def listed(items: Iterable[object], limit: int = 8) -> str:
    """ "0-2, 5": numbers, or names with numbers, as ranges; beyond `limit` entries how many more."""
    every = list(items)
    if all(isinstance(i, int) for i in every):
        entries = ranges(i for i in every if isinstance(i, int))
    elif all(isinstance(i, str) for i in every):
        entries = pieces(str(i) for i in every)
    else:
        entries = [(str(i), 1) for i in every]
    more = sum(count for _, count in entries[limit:])
    return ", ".join(text for text, _ in entries[:limit]) + (f" and {more} more" if more else "")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: node2 before node10."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for c in [*name, ""]:
        if c.isdecimal() and c.isascii():
            digits += c
            continue
        if digits:
            parts.append((0, int(digits), digits))
            digits = ""
        if c:
            parts.append((1, 0, c))
    return parts
