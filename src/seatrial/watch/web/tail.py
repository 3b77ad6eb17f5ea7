"""Reads parts of large logs: the end, what was appended since, or earlier lines."""

from __future__ import annotations

import os
from typing import Any

from seatrial.base.files import open_file
from seatrial.record.folder import RunFolder
from seatrial.record.logs import Log, generations, last_lines_at, logs_of

_LINES = 400  # lines of the end
_MOST_BYTES = 256 << 10  # per response


def logs(folder: RunFolder, generation: int | None) -> dict[str, Any]:
    """The logs of a generation (default: the latest) with their sizes."""
    there = generations(folder)
    chosen = generation if generation in there else (there[-1] if there else 0)
    rows = []
    for log in logs_of(folder, chosen):
        try:
            size: int | None = os.lstat(log.path).st_size
        except OSError:
            size = None
        rows.append({"id": _id(log), "title": log.title, "node": log.node, "rank": log.rank, "size": size})
    missing = [] if rows else ["nothing has been logged yet"]
    return {"generation": chosen, "generations": there, "logs": rows, "missing": missing}


def find(folder: RunFolder, generation: int, wanted: str) -> Log | None:
    """The existing log with this id. A path is never built from the request."""
    return next((log for log in logs_of(folder, generation) if _id(log) == wanted), None)


def part(log: Log, *, after: int | None = None, before: int | None = None) -> dict[str, Any]:
    """At most 256 KiB of lines with their byte range: after or before an offset, else the last ones."""
    try:
        with open(open_file(log.path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if after is not None and after <= size:
                begin, end = after, min(size, after + _MOST_BYTES)
            elif before is not None:
                end = max(0, min(before, size))
                begin = max(0, end - _MOST_BYTES)
            else:
                begin = max(last_lines_at(file, _LINES), size - _MOST_BYTES)
                end = size
            file.seek(max(0, begin - 1))
            torn = begin > 0 and file.read(1) != b"\n"
            data = file.read(end - begin)
    except OSError as error:
        return {"lines": [], "from": 0, "to": 0, "size": 0, "why": f"cannot be read: {error.strerror}"}
    whole = data.rfind(b"\n") + 1
    if whole and end == size and before is None:
        data = data[:whole]  # an incomplete last line is sent when it is complete
    if torn and after is None and b"\n" in data[:-1]:
        cut = data.find(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    text = data.decode("utf-8", errors="backslashreplace").removesuffix("\n")
    return {
        "lines": text.split("\n") if data else [],
        "from": begin,
        "to": begin + len(data),
        "size": size,
        "why": "",
    }


def _id(log: Log) -> str:
    return f"{log.node}/{log.path.name}"
