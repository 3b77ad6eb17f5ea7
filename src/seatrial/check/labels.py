"""Lines that begin with the name of the host or the number of the rank that wrote them, and titles that name hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.check.blame.topology import hostlist
from seatrial.check.names import is_host

# mpirun --tag-output, srun --label, pdsh and clush.
_LABEL = re.compile(
    r"(?:\[[0-9]+,(?P<tag>[0-9]{1,7})\]<std(?:out|err)>:| {0,6}(?P<rank>[0-9]{1,7}):(?: |$)"
    r"|(?P<host>[A-Za-z0-9][A-Za-z0-9._-]{0,251}):(?: |$)) ?"
)
_SHARE = 0.8  # of the lines must have a label: beside them stands what pdsh itself says
_RULE = re.compile(r"-{15,16}")
_TITLE = re.compile(r"(?P<hosts>[A-Za-z0-9][\w.,\[\]-]{0,4000})(?: \([0-9]+\))?")  # clush says how many

Numbered = list[tuple[int, str]]


@dataclass(frozen=True)
class Label:
    """Who wrote a line. A rank is a number that no host has for a name."""

    host: str | None = None
    rank: int | None = None


def label_of(line: str) -> tuple[Label, str] | None:
    """The label of a line, and the line without it; None where it has none."""
    found = _LABEL.match(line)
    if found is None:
        return None
    if (host := found["host"]) is not None:
        return (Label(host=host), line[found.end() :]) if is_host(host) else None
    return Label(rank=int(found["tag"] or found["rank"])), line[found.end() :]


def are_labelled(lines: Sequence[str]) -> bool:
    """Whether lines begin with labels. Many words can be a label, so what follows them must be looked at."""
    filled = [line for line in lines if line.strip()]
    labels = [found[0] for line in filled if (found := label_of(line)) is not None]
    return len(labels) >= max(1, _SHARE * len(filled))


def by_label(lines: Numbered) -> dict[Label | None, Numbered]:
    """The lines of each label, without it; of None those that have none."""
    groups: dict[Label | None, Numbered] = {}
    for number, line in lines:
        label, rest = label_of(line) or (None, line)
        if label is not None or line.strip():
            groups.setdefault(label, []).append((number, rest))
    return groups


def by_title(lines: Numbered) -> list[tuple[tuple[str, ...], Numbered]]:
    """The lines below each title of dshbak or clush -b, with the hosts that it names; what is above the first is of none."""
    parts: list[tuple[tuple[str, ...], Numbered]] = [((), [])]
    at = 0
    while at < len(lines):
        hosts = _hosts([line for _, line in lines[at : at + 3]])
        if hosts:
            parts.append((hosts, []))
            at += 3
        else:
            parts[-1][1].append(lines[at])
            at += 1
    return parts if parts[0][1] else parts[1:] or parts


def _hosts(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) < 3 or not _RULE.fullmatch(lines[0]) or lines[0] != lines[2]:
        return ()
    title = _TITLE.fullmatch(lines[1])
    try:
        names = [] if title is None else hostlist(title["hosts"])
    except ValueError:
        return ()
    return tuple(names) if names and all(map(is_host, names)) else ()
