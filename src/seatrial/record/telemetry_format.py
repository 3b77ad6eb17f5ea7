"""The files of telemetry/nodeN/: tables of fixed-size records, of what an agent read of its node every few seconds.

A chunk `TIME.samples` (unix milliseconds of its start) begins with a line of JSON that names its columns; then each
sample is one record: time and counters as float64, gauges as float32, rounded to 12 bits, little-endian, NaN where a
value was not read. A chunk that is closed becomes `TIME.samples.zst`: after the line, all records' first bytes, then all second bytes, and so
on, compressed with zstd. One older than a day is thinned: one record for every ten, with mean, low and high of gauges.

Telemetry serves diagnosis and alerts only. It may be lost or deleted; events, ledger and metrics are the record of a run.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import zstandard

from seatrial.base.files import names_in, parse_json
from seatrial.record.folder import RunFolder
from seatrial.record.typed import decode

OPEN, PACKED = ".samples", ".samples.zst"
LONGEST_HEADER = 1 << 20  # bytes: a thousand names and more
_VERSION = 1
_NODE = re.compile(r"node([0-9]{1,9})")
_CHUNK = re.compile(r"([0-9]{1,15})\.samples(?:\.zst)?")


@dataclass(frozen=True)
class Header:
    """The columns of a chunk."""

    node: int
    every_s: float  # seconds between two samples
    counters: list[str]
    gauges: list[str]
    thin: int = 1  # samples in a record
    records: int = 0  # of a packed chunk

    @property
    def record_bytes(self) -> int:
        gauge_bytes = 4 if self.thin == 1 else 12  # mean, low and high
        return 8 * (1 + len(self.counters)) + gauge_bytes * len(self.gauges)

    def line(self) -> bytes:
        """The first line of the file."""
        return (
            json.dumps({"seatrial_telemetry": _VERSION, **asdict(self)}, separators=(",", ":")).encode()
            + b"\n"
        )


def parse_header(line: bytes) -> Header:
    """The inverse of `Header.line`. Raises ValueError."""
    if not line.endswith(b"\n"):
        raise ValueError("it does not begin with a line of JSON")
    head = parse_json(line)
    if not isinstance(head, dict) or head.get("seatrial_telemetry") != _VERSION:
        raise ValueError("it does not begin with the line of such a file, or is of another version")
    found = decode(Header, head)
    names = found.counters + found.gauges
    if not all(type(name) is str for name in names) or len(set(names)) < len(names):
        raise ValueError("the names of its columns are not text, or repeated")
    if not (0 < found.every_s < 1e9 and 0 < found.thin < 1_000_000 and found.records >= 0):
        raise ValueError("its first line has numbers that cannot be")
    return found


def packed(header: Header, data: bytes) -> bytes:
    """The content of a closed chunk from the records of an open or thinned one."""
    size = header.record_bytes
    count = len(data) // size
    head = Header(header.node, header.every_s, header.counters, header.gauges, header.thin, count)
    # Byte shuffle: neighbouring samples differ in few of their bytes, so bytes of equal position are stored together.
    columns = b"".join(data[i : count * size : size] for i in range(size))
    return head.line() + zstandard.ZstdCompressor(level=9).compress(columns)


def recorded_nodes(folder: RunFolder) -> list[int]:
    """The nodes that have telemetry; none in a run of an older version."""
    return sorted(int(match[1]) for name in names_in(folder.telemetry) if (match := _NODE.fullmatch(name)))


def chunks(folder: RunFolder, node: int) -> list[Path]:
    """The files of one node by their start, each chunk once: a packed one replaces what it was made from."""
    found: dict[int, str] = {}
    for name in sorted(names_in(folder.telemetry_of(node))):
        if match := _CHUNK.fullmatch(name):
            found[int(match[1])] = name  # X.samples sorts before X.samples.zst
    return [folder.telemetry_of(node) / found[start] for start in sorted(found)]


def start_of(path: Path) -> float:
    """Start of a chunk, unix seconds."""
    return int(path.name.partition(".")[0]) / 1000
