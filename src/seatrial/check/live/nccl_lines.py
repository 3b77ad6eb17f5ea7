"""Select the lines of NCCL_DEBUG=INFO that show which path a collective takes; the rest is not transferred."""

from __future__ import annotations

import re

_TELLS = re.compile(
    r"NCCL WARN|\brank \d+ nRanks \d+ nNodes \d+|coll channels,|NVLS multicast support|Using network"
)
_MOST_LINES = 64  # of one rank; more are repetitions of the same warning


def topology_lines(text: str) -> list[str]:
    """The first lines that nccl_log.py reads, without unprintable characters."""
    found = [line for line in text.splitlines() if "NCCL" in line and _TELLS.search(line)]
    return ["".join(c if c.isprintable() else "?" for c in line[:500]) for line in found[:_MOST_LINES]]
