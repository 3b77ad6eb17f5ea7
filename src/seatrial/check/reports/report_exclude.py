"""The nodes that failed, as a list that Slurm or mpirun reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from seatrial.base.errors import InputError
from seatrial.check.judging.report import Report
from seatrial.check.ranges import natural, numbered, ranges

_NAME = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?$")


def failed_nodes(report: Report) -> list[str]:
    """The nodes with a FAIL, in order. InputError for a name that no host can have: a list could not exclude it."""
    nodes = [name for name, verdict in report.nodes.items() if verdict == "FAIL"]
    if strange := [n for n in nodes if not _NAME.match(n)]:
        names = ", ".join(repr(n) for n in strange)
        raise InputError(
            f"not a host name: {names}", hint="name the folders of the outputs after their nodes"
        )
    return nodes


def hostfile(nodes: Iterable[str]) -> str:
    """One host per line: for `mpirun --hostfile`, pdsh, and Slurm where it takes a file (`sbatch --exclude=./FILE`)."""
    return "".join(f"{node}\n" for node in nodes)


def slurm(nodes: Iterable[str]) -> str:
    """A Slurm node list in one line, "node[1-3,07]", for `sbatch --exclude=` and `scontrol update nodename=`.

    "node7" and "node07" are different hosts, so names with leading zeros form ranges of their own.
    """
    plain, groups = numbered(nodes)
    parts = list(plain)
    for (prefix, suffix, width), numbers in groups.items():
        # Slurm expands "node[9-10]" to node9 and node10, "node[09-10]" to node09 and node10.
        texts = [text for text, _ in ranges(numbers, width, least=2)]
        single = len(texts) == 1 and "-" not in texts[0]
        parts.append(prefix + (texts[0] if single else f"[{','.join(texts)}]") + suffix)
    return ",".join(sorted(parts, key=natural)) + "\n" if parts else "\n"
