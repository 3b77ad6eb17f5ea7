"""Reads telemetry of a run's nodes from the folder: latest values, and series over time.

The names are those of `record.series`; the files are described in `record.telemetry_format`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from seatrial.base.files import open_file
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem
from seatrial.record.series import is_counter
from seatrial.record.telemetry_format import (
    LONGEST_HEADER,
    PACKED,
    Header,
    chunks,
    parse_header,
    recorded_nodes,
    start_of,
)

_LARGEST = 64 << 20  # bytes of a table; a chunk of six hours has about 3 MiB


@dataclass(frozen=True)
class Sample:
    """The latest values of one node."""

    time: float  # unix seconds
    every_s: float  # seconds between two samples: a much older one is of an agent that has ended
    values: dict[str, float]  # series -> value
    rates: dict[str, float]  # counter -> its growth a second since the sample before


@dataclass(frozen=True)
class Points:
    """One series over time: the values of a gauge; of a counter its growth a second since the sample before.

    A point is one sample, or the samples of an interval with their mean, low and high, at the time of the last one.
    There is no point if nothing was read.
    """

    times: NDArray[np.float64]  # unix seconds, increasing
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def read_latest(folder: RunFolder) -> dict[int, Sample]:
    """Node -> its newest sample, from the end of one file each. A node without a usable one is absent."""
    found = {}
    for node in recorded_nodes(folder):
        for path in reversed(chunks(folder, node)):
            try:
                header, table = read_chunk(path, most=2)
            except (OSError, ValueError):
                continue
            if len(table):
                found[node] = _sample(header, table)
                break
    return found


def read_names(folder: RunFolder, node: int) -> list[str]:
    """The series in the latest chunk of one node."""
    for path in reversed(chunks(folder, node)):
        try:
            header, _ = read_chunk(path, most=0)
        except (OSError, ValueError):
            continue
        return sorted(header.gauges + header.counters)
    return []


def read_series(
    folder: RunFolder,
    node: int,
    names: Iterable[str],
    since: float | None = None,
    points: int = 1000,
    problems: list[Problem] | None = None,
) -> dict[str, Points]:
    """Series -> at most `points` points from unix time `since` on; None: from the first.

    A chunk that cannot be used is left out and added to `problems`.
    """
    parts: dict[str, list[Points]] = {name: [] for name in names}
    paths = chunks(folder, node)
    ends = [start_of(path) for path in paths[1:]] + [np.inf]
    for path, end in zip(paths, ends, strict=False):
        if since is not None and end <= since:
            continue
        try:
            header, table = read_chunk(path)
        except (OSError, ValueError) as error:
            if problems is not None:
                reason = error.strerror if isinstance(error, OSError) else error
                problems.append(Problem(str(path.relative_to(folder.path)), 0, f"not used: {reason}"))
            continue
        for name, found in parts.items():
            column = _column(header, table, name)
            if column is not None:
                found.append(column)
    return {name: _joined(name, found, since, points) for name, found in parts.items()}


def read_chunk(path: Path, *, most: int | None = None) -> tuple[Header, NDArray[Any]]:
    """The columns and records of a chunk; an incomplete last record is ignored. `most`: only the last `most` records.

    A record has `time`, `counters` and, of gauges, `mean`, `low` and `high`; the last two only where it is thinned.
    Raises OSError, or ValueError with the file's problem.
    """
    with open(open_file(path), "rb") as file:
        line = file.readline(LONGEST_HEADER)
        header = parse_header(line)
        if path.name.endswith(PACKED):
            table = _unpacked(file, header)
        else:
            size = header.record_bytes
            whole = (os.fstat(file.fileno()).st_size - len(line)) // size
            skipped = 0 if most is None else max(0, whole - most)
            file.seek(skipped * size, os.SEEK_CUR)
            data = file.read(min((whole - skipped) * size, _LARGEST))
            table = np.frombuffer(data, _dtype(header), len(data) // size)
    if most is not None:
        table = table[max(0, len(table) - most) :]
    if not (np.isfinite(table["time"]).all() and (np.diff(table["time"]) > 0).all()):
        raise ValueError("its times do not increase")
    return header, table


def thinned(header: Header, table: NDArray[Any], every: int) -> tuple[Header, NDArray[Any]]:
    """One record for every `every`: mean, low and high of gauges; time and counters of the last of them."""
    thin = Header(header.node, header.every_s, header.counters, header.gauges, every)
    starts = np.arange(0, len(table), every)
    out = np.zeros(len(starts), _dtype(thin))
    if not len(table):
        return thin, out
    ends = np.append(starts[1:], len(table)) - 1
    out["time"], out["counters"] = table["time"][ends], table["counters"][ends]
    values = table["mean"].astype(np.float64)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.int64), starts, axis=0)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    out["mean"] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    out["low"] = np.fmin.reduceat(values, starts, axis=0)
    out["high"] = np.fmax.reduceat(values, starts, axis=0)
    return thin, out


def _dtype(header: Header) -> np.dtype[Any]:
    of_gauges = ("mean",) if header.thin == 1 else ("mean", "low", "high")
    gauges = [(name, "<f4", (len(header.gauges),)) for name in of_gauges]
    return np.dtype([("time", "<f8"), ("counters", "<f8", (len(header.counters),)), *gauges])


def _unpacked(file: IO[bytes], header: Header) -> NDArray[Any]:
    size = header.records * header.record_bytes
    if size > _LARGEST:
        raise ValueError("it has more records than such a file can have")
    try:
        data = zstandard.ZstdDecompressor().stream_reader(file).read(size)
    except zstandard.ZstdError as error:
        raise ValueError(f"it is damaged: {error}") from None
    if len(data) < size:
        raise ValueError("it is cut short")
    rows = np.frombuffer(data, np.uint8).reshape(header.record_bytes, header.records).T
    return np.frombuffer(rows.tobytes(), _dtype(header))


def _sample(header: Header, table: NDArray[Any]) -> Sample:
    last, before = table[-1], table[-2] if len(table) > 1 else None
    values = dict(zip(header.gauges, last["mean"].tolist(), strict=True))
    values |= dict(zip(header.counters, last["counters"].tolist(), strict=True))
    rates: dict[str, float] = {}
    if before is not None:
        grown = (last["counters"] - before["counters"]) / (last["time"] - before["time"])
        rates = dict(zip(header.counters, grown.tolist(), strict=True))
    return Sample(
        float(last["time"]),
        header.every_s,
        {name: value for name, value in values.items() if np.isfinite(value)},
        {name: rate for name, rate in rates.items() if np.isfinite(rate) and rate >= 0},
    )


def _column(header: Header, table: NDArray[Any], name: str) -> Points | None:
    """The samples of one chunk in which the series was read; of a counter its totals."""
    if name in header.counters:
        values = table["counters"][:, header.counters.index(name)]
        columns = [values, values, values]
    elif name in header.gauges:
        i = header.gauges.index(name)
        every = ("mean", "low", "high") if header.thin > 1 else ("mean", "mean", "mean")
        columns = [table[which][:, i].astype(np.float64) for which in every]
    else:
        return None
    known = np.isfinite(columns[0])
    return Points(table["time"][known], *(column[known] for column in columns))


def _joined(name: str, parts: list[Points], since: float | None, most: int) -> Points:
    """`parts`, one after the other, as at most `most` points."""
    empty = np.zeros(0)
    columns = [
        np.concatenate([empty, *(getattr(part, which) for part in parts)])
        for which in ("times", "mean", "low", "high")
    ]
    times = columns[0]
    good = np.diff(times, prepend=-np.inf) > 0  # the clock may have been set back
    if is_counter(name) and len(times):
        grown, seconds = np.diff(columns[1], prepend=np.nan), np.diff(times, prepend=np.nan)
        good &= grown >= 0  # else it was reset
        with np.errstate(invalid="ignore", divide="ignore"):
            columns[1:] = [grown / seconds] * 3
    good &= times >= (-np.inf if since is None else since)
    times, mean, low, high = (column[good] for column in columns)
    if len(times) <= most:
        return Points(times, mean, low, high)
    first, last = times[0] if since is None else since, times[-1]
    place = np.minimum((times - first) * (most / (last - first)), most - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(starts, append=len(times))
    return Points(
        times[starts + counts - 1],
        np.add.reduceat(mean, starts) / counts,
        np.minimum.reduceat(low, starts),
        np.maximum.reduceat(high, starts),
    )
