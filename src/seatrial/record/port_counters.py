"""nodes/nodeN.ports.json: the counters of a node's RDMA ports, as the last start's agent read them first and last.

Absent where the node has no such port, or the run does not use it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from seatrial.base.atomic import json_text, write_text
from seatrial.base.files import read_json
from seatrial.hardware.counters import Port
from seatrial.record.typed import decode


@dataclass(frozen=True)
class PortCounters:
    """Two readings, `seconds` apart: port's name -> its state and counters."""

    began: float  # unix seconds, of the first
    seconds: float
    first: dict[str, Port]
    last: dict[str, Port]


def write_port_counters(path: Path, found: PortCounters) -> None:
    """Replace the file. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, json_text(asdict(found)), durable=False)


def read_port_counters(path: Path) -> PortCounters | None:
    """None if it is not there or cannot be used, or holds only one reading."""
    try:
        found = decode(PortCounters, read_json(path))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.seconds > 0 else None
