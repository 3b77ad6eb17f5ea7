"""Writes the column cache of a live run's records, so that views of a long run need not parse its JSON again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.base.complain import complain
from seatrial.record import bulk, jsonl
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord


@dataclass
class _Cached:
    """How much of a file is cached."""

    offset: int = 0  # where whole pieces end
    size: int = 0  # bytes cached after it, of a piece that grows
    file: Path | None = None  # of that piece


class ColumnCacheWriter:
    """At most one piece of each file per poll, which takes 30 ms."""

    def __init__(self, folder: RunFolder) -> None:
        self._columns = folder.columns
        self._files: dict[tuple[Path, Any], _Cached] = {
            (folder.metrics, MetricsRecord): _Cached(),
            (folder.ledger, LedgerRecord): _Cached(),
        }
        self._stale = set(folder.columns.glob("*"))  # of an earlier process, and not found again yet

    def poll(self, now: float) -> None:
        """Cache pieces that are new or have grown. Without a cache, readers parse the file."""
        behind = False
        for (path, cls), cached in list(self._files.items()):
            try:
                behind |= self._add(path, cls, cached)
            except FileNotFoundError:  # no step yet
                continue
            except OSError as error:
                complain(f"column cache of {path.name} not written: {error}")
                del self._files[path, cls]
        if not behind:
            stale, self._stale = self._stale, set()
            try:
                for file in stale:
                    file.unlink(missing_ok=True)
            except OSError as error:
                complain(f"old column cache not deleted: {error}")

    def _add(self, path: Path, cls: Any, cached: _Cached) -> bool:
        """Whether a whole piece was cached, after which there may be more."""
        size = jsonl.piece_bytes(path.stat().st_size - cached.offset)
        if size <= 0 or size == cached.size:
            return False
        cached.size = size
        found = bulk.keep(cls, path, cached.offset, size, self._columns)
        if found is None:  # a line longer than that; readers take a longer piece
            return False
        end, file = found
        self._stale.discard(file)
        if cached.file is not None and cached.file != file:  # the same if only a part of a line was added
            cached.file.unlink(missing_ok=True)
        cached.file = file
        if size == jsonl.PIECE_BYTES:
            cached.offset, cached.size, cached.file = end, 0, None
        return size == jsonl.PIECE_BYTES

    def close(self, until: float) -> None:
        """Nothing to do: readers parse what is not cached."""
