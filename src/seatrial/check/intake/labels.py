"""Lines prefixed with the host or rank that wrote them, and titles that name hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.check.names import hostlist, is_host

# Prefixes of mpirun --tag-output, srun --label, pdsh and clush.
_LABEL = re.compile(
    r"(?:\[[0-9]+,(?P<tag>[0-9]{1,7})\]<std(?:out|err)>:| {0,6}(?P<rank>[0-9]{1,7}):(?: |$)"
    r"|(?P<host>[A-Za-z0-9][A-Za-z0-9._-]{0,251}):(?: |$)) ?"
)
_SHARE = 0.8  # minimum share of labelled lines; pdsh adds messages of its own
_RULE = re.compile(r"-{15,16}")
# clush appends the number of hosts.
_TITLE = re.compile(r"(?P<hosts>[A-Za-z0-9][\w.,\[\]-]{0,4000})(?: \([0-9]+\))?")

Numbered = list[tuple[int, str]]


@dataclass(frozen=True)
class Label:
    """Who wrote a line. A number that cannot be a host name is a rank."""

    host: str | None = None
    rank: int | None = None


def label_of(line: str) -> tuple[Label, str] | None:
    """The label of a line and the rest of the line; None if it has no label."""
    found = _LABEL.match(line)
    if found is None:
        return None
    if (host := found["host"]) is not None:
        return (Label(host=host), line[found.end() :]) if is_host(host) else None
    return Label(rank=int(found["tag"] or found["rank"])), line[found.end() :]


def are_labelled(lines: Sequence[str]) -> bool:
    """Whether the lines are labelled. Many words look like labels, so the text behind them must be checked too."""
    filled = [line for line in lines if line.strip()]
    labels = [found[0] for line in filled if (found := label_of(line)) is not None]
    return len(labels) >= max(1, _SHARE * len(filled))


def by_label(lines: Numbered) -> dict[Label | None, Numbered]:
    """Lines by label, without it; None: lines without a label."""
    groups: dict[Label | None, Numbered] = {}
    for number, line in lines:
        label, rest = label_of(line) or (None, line)
        if label is not None or line.strip():
            groups.setdefault(label, []).append((number, rest))
    return groups


def by_title(lines: Numbered) -> list[tuple[tuple[str, ...], Numbered]]:
    """Sections below the titles of dshbak or clush -b, each with its hosts; text before the first title has no host."""
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
