"""nodes/nodeN.ports.json and nodeN.gpus.json: what the last start's agent read of a node's RDMA ports and GPUs.

Absent where the node has none, the run does not use them, or they cannot be read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

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


@dataclass(frozen=True)
class GpuUse:
    """One GPU in these seconds. None: not known."""

    sm_mhz: float | None  # mean clock of the samples in which it was busy
    samples: int  # number of samples
    pcie_replays: int | None
    nvlink: dict[str, int] | None  # "LINK COUNTER" -> errors, those that grew
    tensor_active: float | None = None  # share of the time, 0..1, from its first busy sample to its last


@dataclass(frozen=True)
class GpuCounters:
    """PCI address -> what happened at this GPU in `seconds`."""

    began: float  # unix seconds
    seconds: float
    gpus: dict[str, GpuUse]


Counters = TypeVar("Counters", PortCounters, GpuCounters)


def write_counters(path: Path, found: PortCounters | GpuCounters) -> None:
    """Replace the file. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, json_text(asdict(found)), durable=False)


def read_counters(kind: type[Counters], path: Path) -> Counters | None:
    """None if it is not there or cannot be used."""
    try:
        found = decode(kind, read_json(path))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.seconds > 0 else None
