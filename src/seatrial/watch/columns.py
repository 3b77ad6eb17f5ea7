"""Writes the column cache of a live run's records, so that views of a long run need not parse its JSON again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.base.complain import complain
from seatrial.record import bulk
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord


class ColumnCacheWriter:
    """At most one chunk per poll, which takes 30 ms."""

    def __init__(self, folder: RunFolder) -> None:
        self._columns = folder.columns
        self._offsets: dict[tuple[Path, Any], int] = {
            (folder.metrics, MetricsRecord): 0,
            (folder.ledger, LedgerRecord): 0,
        }

    def poll(self, now: float) -> None:
        """Write chunks that have become complete. Without a cache, readers parse the file."""
        for (path, cls), offset in list(self._offsets.items()):
            try:
                end = bulk.keep(cls, path, offset, self._columns)
            except FileNotFoundError:  # no step yet
                continue
            except OSError as error:
                complain(f"column cache of {path.name} not written: {error}")
                end = None
            if end is None:
                del self._offsets[path, cls]
            else:
                self._offsets[path, cls] = end

    def close(self, until: float) -> None:
        """Nothing to do: readers parse what is not cached."""
