"""Writes telemetry/nodeN/, by one process of the node's agent. Imports no numpy until something is to be thinned."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.files import open_file, read_bytes
from seatrial.record.folder import RunFolder
from seatrial.record.series import is_counter
from seatrial.record.telemetry_format import OPEN, PACKED, Header, chunks, packed, parse_header, start_of

CHUNK_S = 6 * 3600.0  # seconds of samples in one file: four files a day and node
THIN_AFTER_S, THIN = 24 * 3600.0, 10  # older chunks keep one record per THIN samples
MOST_SERIES = 1024  # per node; further ones are dropped


class TelemetryWriter:
    """Appends samples to the open chunk of one node; starts a new one when it is full or there are new series."""

    def __init__(self, folder: RunFolder, node: int, every_s: float) -> None:
        self._folder, self._node, self._every_s = folder, node, every_s
        self._names: set[str] = set()
        self._header: Header | None = None
        self._record = struct.Struct("")
        self._fd, self._path = -1, Path()
        self._ends = self._last = 0.0

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """Append one sample. Raises OSError; the next sample then starts a new chunk."""
        if time <= self._last:
            return  # the clock was set back: records are in order of time
        new = sorted(name for name in values if name not in self._names)[: MOST_SERIES - len(self._names)]
        if new or self._header is None or time >= self._ends:
            self._names.update(new)
            self._begin(time)
        header = self._header
        assert header is not None
        counters = [values.get(name, math.nan) for name in header.counters]
        gauges = [_rounded(values.get(name, math.nan)) for name in header.gauges]
        try:
            data = self._record.pack(time, *counters, *gauges)
            # A torn record would shift all later ones.
            if os.write(self._fd, data) < len(data):
                raise OSError("the disk is full")
        except OSError:
            self.close()
            raise
        self._last = time

    def close(self) -> None:
        """Close the open chunk; it stays as it is until `tidy`."""
        if self._fd >= 0:
            os.close(self._fd)
        self._header, self._fd, self._path = None, -1, Path()

    def tidy(self, now: float) -> None:
        """Compress the chunks that are no longer written, and thin the old ones. Raises OSError."""
        for path in chunks(self._folder, self._node):
            if path != self._path:
                _tidy(path, thin=now - start_of(path) >= CHUNK_S + THIN_AFTER_S)

    def _begin(self, time: float) -> None:
        self.close()
        names = sorted(self._names)
        counters = [name for name in names if is_counter(name)]
        gauges = [name for name in names if not is_counter(name)]
        header = Header(self._node, self._every_s, counters, gauges)
        folder = self._folder.telemetry_of(self._node)
        # Not its parents: a run folder that was moved away must not appear again.
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{time * 1000:013.0f}{OPEN}"
        self._fd = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        line = header.line()
        if os.write(self._fd, line) < len(line):
            raise OSError("the disk is full")
        self._record = struct.Struct(f"<{1 + len(counters)}d{len(gauges)}f")
        self._header, self._ends = header, time + CHUNK_S


def _rounded(value: float) -> float:
    """To 12 bits, 0.01 %: the others are noise, which does not compress."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 4096), exponent - 12) if math.isfinite(value) else value


def _tidy(path: Path, *, thin: bool) -> None:
    """Compress `path`, and thin it if it is old. An unreadable file is left unchanged."""
    is_open = path.name.endswith(OPEN)
    with contextlib.suppress(ValueError):
        if thin:
            # numpy only now: it takes a tenth of a second and 20 MB, which most agents never need.
            from seatrial.record.telemetry import read_chunk, thinned

            header, table = read_chunk(path)
            if header.thin > 1:
                return
            header, table = thinned(header, table, THIN)
            content = packed(header, table.tobytes())
        elif is_open:
            line, _, data = read_bytes(path).partition(b"\n")
            content = packed(parse_header(line + b"\n"), data)
        else:
            return
        atomic.write_bytes(path.with_name(path.name.partition(".")[0] + PACKED), content, durable=False)
        if is_open:
            path.unlink()
