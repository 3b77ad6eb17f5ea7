"""The nodes that failed, as a list that Slurm or mpirun reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from seatrial.base.errors import InputError
from seatrial.check.report import Report, natural

_NAME = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?$")
_NUMBERED = re.compile(r"^(?P<prefix>.*?)(?P<number>\d+)$")


def failed_nodes(report: Report) -> list[str]:
    """The nodes with a FAIL, in order. InputError for a name that no host can have: it would not exclude it."""
    nodes = [name for name, verdict in report.nodes.items() if verdict == "FAIL"]
    if strange := [n for n in nodes if not _NAME.match(n)]:
        names = ", ".join(repr(n) for n in strange)
        raise InputError(
            f"no name of a host: {names}", hint="name the folders with the outputs after their nodes"
        )
    return nodes


def hostfile(nodes: Iterable[str]) -> str:
    """One host a line: for `mpirun --hostfile`, pdsh, and Slurm where it takes a file (`sbatch --exclude=./FILE`)."""
    return "".join(f"{node}\n" for node in nodes)


def slurm(nodes: Iterable[str]) -> str:
    """As Slurm writes a list of nodes, "node[1-3,07]", for `sbatch --exclude=` and `scontrol update nodename=`. One line.

    "node7" and "node07" are different hosts, so what has leading zeros makes ranges of its own.
    """
    alone: list[str] = []
    numbered: dict[tuple[str, int], list[int]] = {}
    for node in dict.fromkeys(nodes):
        if found := _NUMBERED.match(node):
            digits = found["number"]
            # "node[9-10]" is node9 and node10 to Slurm, "node[09-10]" is node09 and node10.
            padded = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
            numbered.setdefault((found["prefix"], padded), []).append(int(digits))
        else:
            alone.append(node)
    parts = list(alone)
    for (prefix, width), numbers in numbered.items():
        ranges = _ranges(sorted(numbers), width)
        single = len(ranges) == 1 and "-" not in ranges[0]
        parts.append(f"{prefix}{ranges[0]}" if single else f"{prefix}[{','.join(ranges)}]")
    return ",".join(sorted(parts, key=natural)) + "\n" if parts else "\n"


def _ranges(numbers: list[int], width: int) -> list[str]:
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in found]
