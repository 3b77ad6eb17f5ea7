"""What a worker leaves when it fails: its error file and its log's last lines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from seatrial.base.files import open_file
from seatrial.control.agent.worker import Worker
from seatrial.record.failure import read_rank_error
from seatrial.record.folder import RunFolder
from seatrial.record.messages import RankExited

_TAIL_LINES = 20
_TAIL_BYTES = 16384


def with_error(exited: RankExited, folder: RunFolder, worker: Worker) -> RankExited:
    """`exited` with the rank's error, its log, and the log's last lines or the error's traceback."""
    error = read_rank_error(folder.rank_error(worker.generation, worker.rank_spec.node, worker.rank))
    text = (error and error.traceback) or ""
    tail = last_lines(text, 2 * _TAIL_LINES) or tail_of(worker.log)
    return replace(exited, log=str(worker.log), tail=tail, error=error)


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
