"""ranks/GENERATION/rankN.stages: the seconds that one rank spent in each stage of each step.

A line of JSON, then one record of fixed size for each step: its number (uint32) and the seconds of each stage of the
line's "stages" (float32), little-endian. Appended to by one rank; a killed rank loses what it had not written yet.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seatrial.base.files import open_file, parse_json
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem

# Work of the rank itself, then waiting for others, then all of a validation, its waits included: the order in which
# `record.frontier` adds them up.
DATA, HOST, FORWARD, BACKWARD, OPTIMIZER, SAVE, TENSOR, SHARD, REPLICATE, PIPELINE, STEP_SUM, VALIDATION = (
    range(12)
)
STAGES = (
    *("data", "host", "forward", "backward", "optimizer", "save"),
    *("tensor", "shard", "replicate", "pipeline", "step_sum"),
    "validation",
)
OWN = SAVE + 1  # the first so many are work of the rank itself

_VERSION = 1
_LONGEST_HEADER = 1 << 16  # bytes
_AT_ONCE, _AT_LEAST_EVERY_S = 64, 5.0
_NAME = re.compile(r"rank([0-9]{1,9})\.stages")


@dataclass(frozen=True)
class RankStages:
    """What one rank recorded in one generation; a step that was done again counts once, as done last."""

    generation: int
    rank: int
    ranks: int  # of the generation
    clock: str  # what was measured: "cpu", the wall clock; "cuda", the device
    first_step: int  # of the generation
    not_separated: Mapping[str, str]  # stage -> where its time is counted instead
    steps: NDArray[np.int64]  # increasing
    seconds: NDArray[np.float64]  # steps x STAGES
    gpu: str | None = None  # its PCI address; None on a CPU, and in older records


class StageWriter:
    """Appends to the file of one rank, about every 64 steps or 5 seconds. Raises OSError where it cannot."""

    def __init__(
        self,
        folder: RunFolder,
        generation: int,
        rank: int,
        *,
        ranks: int,
        clock: str,
        first_step: int,
        not_separated: Mapping[str, str],
        gpu: str | None = None,
    ) -> None:
        path = folder.stages(generation, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = struct.Struct(f"<I{len(STAGES)}f")
        self._buffer = bytearray()
        self._written = time.monotonic()
        # A generation's number is never used again: what is there would be of another process of this rank.
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        head = {
            "seatrial_stages": _VERSION,
            "generation": generation,
            "rank": rank,
            "ranks": ranks,
            "clock": clock,
            "first_step": first_step,
            "stages": STAGES,
            "not_separated": dict(not_separated),
            **({} if gpu is None else {"gpu": gpu}),
        }
        self._buffer += json.dumps(head, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def add(self, step: int, seconds: Sequence[float]) -> None:
        """Append the seconds of one step, in the order of STAGES."""
        self._buffer += self._record.pack(step, *seconds)
        full = len(self._buffer) >= _AT_ONCE * self._record.size
        if full or time.monotonic() - self._written >= _AT_LEAST_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._written = time.monotonic()
        while self._buffer:
            del self._buffer[: os.write(self._fd, self._buffer)]

    def close(self) -> None:
        """Write what is buffered, and close."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


def read_generation(
    folder: RunFolder, generation: int, *, most: int | None = None, at: int | None = None
) -> tuple[dict[int, RankStages], list[Problem]]:
    """Rank -> what it recorded, and the files that cannot be used; nothing where a generation recorded nothing.

    `most`: only the last so many records of each rank, or so many from the one with index `at`.
    """
    found: dict[int, RankStages] = {}
    problems: list[Problem] = []
    try:
        names = sorted(os.listdir(folder.ranks / f"{generation:06d}"))
    except OSError:  # not there in runs of older versions
        return found, problems
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        rank = int(match[1])
        path = folder.stages(generation, rank)
        try:
            stages = read_stages(path, most=most, at=at)
            if stages is not None and (stages.generation, stages.rank) != (generation, rank):
                raise ValueError(f"is of generation {stages.generation}, rank {stages.rank}")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(Problem(str(path.relative_to(folder.path)), 1, f"not used: {reason}"))
            continue
        if stages is not None:
            found[rank] = stages
    return found, problems


def read_stages(path: Path, *, most: int | None = None, at: int | None = None) -> RankStages | None:
    """What is in one file; None if its rank ended before it had written the first line.

    `most`, `at`: see `read_generation`. An incomplete last record is ignored. Raises OSError, or ValueError with what is wrong with the file.
    """
    with open(open_file(path), "rb") as file:
        line = file.readline(_LONGEST_HEADER)
        if not line.endswith(b"\n"):
            if len(line) == _LONGEST_HEADER:
                raise ValueError("it does not begin with a line of JSON")
            return None
        head = _header(line)
        columns = head.pop("stages")
        kind = np.dtype([("step", "<u4"), ("seconds", "<f4", (len(columns),))])
        whole = (os.fstat(file.fileno()).st_size - len(line)) // kind.itemsize
        wanted = whole if most is None else min(most, whole)
        begin = whole - wanted if at is None else min(at, whole)
        wanted = min(wanted, whole - begin)
        file.seek(begin * kind.itemsize, os.SEEK_CUR)
        data = file.read(wanted * kind.itemsize)
    table = np.frombuffer(data, dtype=kind, count=len(data) // kind.itemsize)
    values = table["seconds"].astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)).all(axis=1))
    if wrong.size:
        raise ValueError(f"the seconds of step {table['step'][wrong[0]]} are not times")
    seconds = np.zeros((len(table), len(STAGES)))
    for i, name in enumerate(columns):
        seconds[:, STAGES.index(name)] = values[:, i]
    # `unique` keeps the first of equal ones: the last is the first from the end.
    steps, last = np.unique(table["step"][::-1].astype(np.int64), return_index=True)
    return RankStages(**head, steps=steps, seconds=seconds[::-1][last])


def _header(line: bytes) -> dict[str, Any]:
    """The fields of RankStages and "stages". Raises ValueError."""
    try:
        head = parse_json(line.decode())
    except ValueError as error:
        raise ValueError(f"it does not begin with a line of JSON: {error}") from None
    if not isinstance(head, dict) or "seatrial_stages" not in head:
        raise ValueError("it does not begin with the line of such a file")
    if head["seatrial_stages"] != _VERSION:
        raise ValueError(f"it is of version {head['seatrial_stages']}, this Seatrial reads {_VERSION}")
    kinds = {
        "generation": int,
        "rank": int,
        "ranks": int,
        "clock": str,
        "first_step": int,
        "not_separated": dict,
        "stages": list,
    }
    for key, kind in kinds.items():
        if type(head.get(key)) is not kind:
            raise ValueError(f"its first line has no {key}, or one of another type")
    unknown = [str(name) for name in head["stages"] if name not in STAGES]
    if unknown or not head["stages"] or len(set(head["stages"])) != len(head["stages"]):
        raise ValueError(f"its stages are not those of this version ({', '.join(unknown) or 'repeated'})")
    gpu = head.get("gpu")
    return {key: head[key] for key in kinds} | {"gpu": gpu if isinstance(gpu, str) else None}
