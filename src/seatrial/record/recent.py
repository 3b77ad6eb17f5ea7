"""The end of a run's records without reading all of them: the time of a recovery must not grow with the run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from seatrial.base.files import open_file, parse_json
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import encode
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord, current_history
from seatrial.record.typed import decode

Record = TypeVar("Record")

_BLOCK_BYTES = 16 << 20
_BYTES_A_RECORD = 600  # upper bound
_TOLD = re.compile(rb'"told":"([\w-]+)"')  # no match inside a string value: quotation marks there are escaped
_SKIPPED = encode({"skipped": True})[1:-2]  # as it appears in a line


def recent_metrics(folder: RunFolder, count: int) -> list[MetricsRecord]:
    """The records of about the last `count` steps that led to the run's current state, by step."""
    last: dict[int, MetricsRecord] = {}
    for record in _usable(MetricsRecord, _last_lines(folder.metrics, 4 * count)):
        known = last.get(record.step)
        if known is None or record.generation >= known.generation:
            last[record.step] = record
    return current_history(last.values())[-count:]


def recent_ledger(folder: RunFolder, count: int) -> list[LedgerRecord]:
    """About the last `count` records, in file order."""
    return list(_usable(LedgerRecord, _last_lines(folder.ledger, count)))


def skipped_steps(folder: RunFolder) -> list[int]:
    """The steps that were skipped on purpose, each once. Searches the whole ledger, but parses only their lines."""
    lines = []
    for data in _blocks(folder.ledger):
        at = data.find(_SKIPPED)
        while at >= 0:
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            lines.append(data[data.rfind(b"\n", 0, at) + 1 : end])
            at = data.find(_SKIPPED, end)
    return sorted({r.step for r in _usable(LedgerRecord, lines) if r.skipped})


def recorded_marks(folder: RunFolder) -> set[str]:
    """The marks ("told") of all events that have one. Searches the file without parsing its lines."""
    return {mark.decode() for data in _blocks(folder.events) for mark in _TOLD.findall(data)}


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in blocks that end at line ends; stops at an overlong line, and yields nothing if it cannot be read."""
    rest = b""
    with contextlib.suppress(OSError), open(open_file(path), "rb") as f:
        while block := f.read(_BLOCK_BYTES):
            data = rest + block
            end = data.rfind(b"\n") + 1
            if not end and rest:
                return
            yield data[:end]
            rest = data[end:]
        yield rest


def _last_lines(path: Path, count: int) -> list[bytes]:
    """At most the last `count` lines; none if the file does not exist."""
    try:
        with open(open_file(path), "rb") as f:
            start = max(0, f.seek(0, os.SEEK_END) - count * _BYTES_A_RECORD)
            f.seek(start)
            lines = f.read().split(b"\n")
    except OSError:
        return []
    return lines[1 if start else 0 :][-count - 1 :]


def _usable(cls: type[Record], lines: list[bytes]) -> Iterator[Record]:
    """The records among `lines`. Readers of the whole file report the others."""
    for line in lines:
        try:
            values: Any = parse_json(line)
            if isinstance(values, dict):
                yield decode(cls, values)
        except ValueError:
            continue
