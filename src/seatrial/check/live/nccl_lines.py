"""What of NCCL_DEBUG=INFO says which way a collective goes; the rest of it would only be carried about."""

from __future__ import annotations

import re

_TELLS = re.compile(
    r"NCCL WARN|\brank \d+ nRanks \d+ nNodes \d+|coll channels,|NVLS multicast support|Using network"
)
_MOST_LINES = 64  # of one rank; more are the same warning again and again


def telling(text: str) -> list[str]:
    """The lines that nccl_log.py reads, the first of them, without what is no text."""
    found = [line for line in text.splitlines() if "NCCL" in line and _TELLS.search(line)]
    return ["".join(c if c.isprintable() else "?" for c in line[:500]) for line in found[:_MOST_LINES]]
