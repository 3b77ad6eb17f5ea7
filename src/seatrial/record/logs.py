"""The logs of a run: list them, and find the end of one without reading all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from seatrial.base.files import names_in
from seatrial.record.folder import RunFolder

_RANK = re.compile(r"rank(\d{1,9})\.log")
_NODE = re.compile(r"node(\d{1,9})")
_SCHEDULED = re.compile(r".*-node(\d{1,9})\.log")  # slurm-4711-node2.log

_BLOCK_BYTES = 64 << 10
_FARTHEST_BYTES = 16 << 20  # limit of the search back from the end: a log may have no line ends


@dataclass(frozen=True)
class Log:
    """One log file. `rank` is None for logs of an agent, of its fork server, or of a scheduler."""

    node: int
    rank: int | None
    generation: int  # 0: of a scheduler, which does not know it
    path: Path

    @property
    def title(self) -> str:
        """Node, and rank or, if it is not a rank's log, the file's stem."""
        what = self.path.stem if self.rank is None else f"rank {self.rank}"
        return f"node {self.node}, {what}"


def generations(folder: RunFolder) -> list[int]:
    """The generations that have a folder of logs, ascending."""
    return sorted(int(name) for name in names_in(folder.logs) if name.isdecimal())


def logs_of(folder: RunFolder, generation: int) -> list[Log]:
    """The logs of a generation by node, ranks first; agents' logs are those of the start that it belongs to."""
    found = list(_in_generation(folder, generation))
    ranks = [log for log in found if log.rank is not None]
    # An agent writes into the folder of the first generation of its start; the newest one counts.
    others = {(log.node, log.path.name): log for log in found if log.rank is None}
    for earlier in reversed([g for g in generations(folder) if g < generation]):
        if others:
            break
        others = {
            (log.node, log.path.name): log for log in _in_generation(folder, earlier) if log.rank is None
        }
    scheduled = [
        Log(int(match[1]), None, 0, folder.logs / name)
        for name in names_in(folder.logs)
        if (match := _SCHEDULED.fullmatch(name))
    ]
    last = 1 << 62
    return sorted(
        [*ranks, *others.values(), *scheduled],
        key=lambda log: (log.node, last if log.rank is None else log.rank, log.path.name),
    )


def _in_generation(folder: RunFolder, generation: int) -> Iterator[Log]:
    place = folder.rank_log(generation, 0, 0).parent.parent
    for name in names_in(place):
        if node := _NODE.fullmatch(name):
            for file in names_in(place / name):
                rank = _RANK.fullmatch(file)
                if rank or file.endswith(".log"):
                    yield Log(int(node[1]), int(rank[1]) if rank else None, generation, place / name / file)


def last_lines_at(file: BinaryIO, count: int) -> int:
    """Offset of the last `count` lines of a file; at most `_FARTHEST_BYTES` from its end."""
    size = at = file.seek(0, os.SEEK_END)
    wanted = count + 1  # line ends: including that of the preceding line
    if size and count:
        file.seek(size - 1)
        wanted -= file.read(1) != b"\n"
    while at > max(0, size - _FARTHEST_BYTES) and count:
        start = max(0, at - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(at - start)
        ends = block.count(b"\n")
        if ends >= wanted:
            place = len(block)
            for _ in range(wanted):
                place = block.rfind(b"\n", 0, place)
            return start + place + 1
        wanted -= ends
        at = start
    return at
