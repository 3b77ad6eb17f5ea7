"""What a worker leaves when it fails: its error file and its log's last lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from seatrial.base.files import open_file, read_json
from seatrial.control.agent.worker import Worker
from seatrial.record.folder import RunFolder

_TAIL_LINES = 20
_TAIL_BYTES = 16384


def error_of(folder: RunFolder, worker: Worker) -> dict[str, Any]:
    """{"log", "tail", "error"}; `error` is the rank's error file, None if it wrote none or was killed while writing."""
    path = folder.rank_error(worker.generation, worker.generation_spec.node, worker.rank)
    error: dict[str, Any] | None
    try:
        error = read_json(path)
        assert isinstance(error, dict)
        error["time"] = float(error["time"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        error = None
    tail = last_lines((error or {}).get("traceback") or "", 2 * _TAIL_LINES) or tail_of(worker.log)
    return {"log": str(worker.log), "tail": tail, "error": error}


def tail_of(log: Path) -> str:
    """The last lines of `log`; empty where it cannot be read."""
    try:
        with open(open_file(log), "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return last_lines(f.read().decode(errors="replace"), _TAIL_LINES)
    except OSError:
        return ""


def last_lines(text: str, count: int) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])
