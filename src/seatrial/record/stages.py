"""ranks/GENERATION/rankN.stages: the seconds that one rank spent in each stage of each step.

A line of JSON, then one record of fixed size for each step: its number (uint32) and the seconds of each stage of the
line's "stages" (float32), little-endian. Appended to by one rank; a killed rank loses what it had not written yet.

Every PART records move to rankN.stages.zst, because a thousand ranks would write GBs a day: after the same line,
blocks of records, each with three numbers (uint32) before it: of its records, of its compressed bytes, and the first step.
Seconds are rounded there to 11 bits, 0.02 %, and bytes are shuffled: all records' first bytes, then all second bytes, and
so on, compressed with zstd. With many ranks and short steps, a block has a sample of its steps, the same in all ranks.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from seatrial.base.files import open_file, parse_json
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem

# Work of the rank itself, then waiting for others, then all of a validation, its waits included: the order in which
# `record.frontier` adds them up.
(
    DATA,
    HOST,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    SAVE,
    TENSOR,
    EXPERT,
    CONTEXT,
    SHARD,
    REPLICATE,
    PIPELINE,
    STEP_SUM,
    VALIDATION,
) = range(14)
STAGES = (
    *("data", "host", "forward", "backward", "optimizer", "save"),
    *("tensor", "expert", "context", "shard", "replicate", "pipeline", "step_sum"),
    "validation",
)
OWN = SAVE + 1  # number of stages that are the rank's own work; they come first

_VERSION = 1
_LONGEST_HEADER = 1 << 16  # bytes
_AT_ONCE, _AT_LEAST_EVERY_S = 64, 5.0
PART = 1024  # records
_LEAST_S = 3.0 / 1024  # seconds between two steps that are kept, for each rank of the generation
_BLOCK = struct.Struct("<III")  # records, bytes, first step
_LARGEST_BLOCK = 1 << 24  # bytes


@dataclass(frozen=True)
class RankStages:
    """The record of one rank in one generation; of a redone step only the last attempt."""

    generation: int
    rank: int
    ranks: int  # of the generation
    clock: str  # clock of the measurement: "cpu", the wall clock; "cuda", the device
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
        self._recent = bytearray()  # records that are not in a block yet
        self._least_s = ranks * _LEAST_S
        self._packed = folder.packed_stages(generation, rank)
        self._written = time.monotonic()
        # Generation numbers are never reused: an existing file would be of another process of this rank.
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
        self._head = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        self._buffer += self._head
        self.flush()
        self._packed.unlink(missing_ok=True)

    def add(self, step: int, seconds: Sequence[float]) -> None:
        """Append the seconds of one step, in the order of STAGES."""
        record = self._record.pack(step, *seconds)
        self._buffer += record
        self._recent += record
        if len(self._recent) >= PART * self._record.size:
            self.flush()
            self._pack()
        full = len(self._buffer) >= _AT_ONCE * self._record.size
        if full or time.monotonic() - self._written >= _AT_LEAST_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._written = time.monotonic()
        while self._buffer:
            del self._buffer[: os.write(self._fd, self._buffer)]

    def _pack(self) -> None:
        """Move the records to a block. Killed between the two writes, it leaves them in both files: they count once."""
        block = _packed(bytes(self._recent), self._record.size, self._least_s)
        fd = open_file(self._packed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            data = (b"" if os.fstat(fd).st_size else self._head) + block
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        os.ftruncate(self._fd, len(self._head))
        self._recent.clear()

    def close(self) -> None:
        """Write what is buffered, and close."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


def read_generation(
    folder: RunFolder, generation: int, *, most: int | None = None, until: int | None = None
) -> tuple[dict[int, RankStages], list[Problem]]:
    """Rank -> what it recorded, and the files that cannot be used; nothing where a generation recorded nothing.

    `most`: only the last `most` records of each rank, up to step `until` if given.
    """
    found: dict[int, RankStages] = {}
    problems: list[Problem] = []
    for rank in folder.ranks_with(generation, ".stages"):
        path = folder.stages(generation, rank)
        try:
            stages = read_stages(path, folder.packed_stages(generation, rank), most=most, until=until)
            if stages is not None and (stages.generation, stages.rank) != (generation, rank):
                raise ValueError(f"is of generation {stages.generation}, rank {stages.rank}")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(Problem(str(path.relative_to(folder.path)), 1, f"not used: {reason}"))
            continue
        if stages is not None:
            found[rank] = stages
    return found, problems


def read_stages(
    path: Path, packed: Path | None = None, *, most: int | None = None, until: int | None = None
) -> RankStages | None:
    """The content of one file and of `packed`; None if the rank ended before writing the first line.

    `most`, `until`: see `read_generation`. An incomplete last record or block is ignored. Raises OSError, or ValueError with what is
    wrong with a file.
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
        wanted = whole if most is None or until is not None else min(most, whole)
        file.seek((whole - wanted) * kind.itemsize, os.SEEK_CUR)
        data = file.read(wanted * kind.itemsize)
    table = np.frombuffer(data, dtype=kind, count=len(data) // kind.itemsize)
    if until is not None:
        table = table[table["step"] <= until]
    # Only now: records that are packed meanwhile are then read twice, which does no harm, and not missed.
    if packed is not None and (most is None or len(table) < most) and packed.exists():
        table = np.concatenate([*_blocks(packed, line, kind, most, until, len(table)), table])
    table = table if most is None else table[max(0, len(table) - most) :]
    values = table["seconds"].astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)).all(axis=1))
    if wrong.size:
        raise ValueError(f"the seconds of step {table['step'][wrong[0]]} are not times")
    seconds = np.zeros((len(table), len(STAGES)))
    for i, name in enumerate(columns):
        seconds[:, STAGES.index(name)] = values[:, i]
    # `unique` keeps the first of equal ones: the last is the first from the end.
    steps, at = np.unique(table["step"][::-1].astype(np.int64), return_index=True)
    return RankStages(**head, steps=steps, seconds=seconds[::-1][at])


def _packed(records: bytes, size: int, least_s: float) -> bytes:
    """One block of `records`, each of `size` bytes; of so many that one is left for every `least_s` seconds."""
    words = np.frombuffer(records, "<u4").reshape(-1, size // 4)
    first = int(words[:, 0].min())
    mean_s = float(words[:, 1:].view("<f4").sum(axis=1).mean())
    # By powers of two and a hash of the step: ranks agree even if their clocks do not, and periodic saves do not bias it.
    one_in = 2 ** max(0, math.ceil(math.log2(least_s / max(mean_s, 1e-6))))
    words = words[words[:, 0] * np.uint32(0x9E3779B1) < (1 << 32) / one_in].copy()
    # 11 of float32's 23 bits of fraction: the others are noise, which does not compress.
    words[:, 1:] = (words[:, 1:] + np.uint32(0x800)) & np.uint32(0xFFFFF000)
    words[1:, 0] = np.diff(words[:, 0])  # steps mostly grow by 1
    columns = words.view(np.uint8).T.tobytes()
    block = zstandard.ZstdCompressor(level=9, write_checksum=True).compress(columns)
    return _BLOCK.pack(len(words), len(block), first) + block


def _blocks(
    path: Path, line: bytes, kind: np.dtype[Any], most: int | None, until: int | None, known: int
) -> list[NDArray[Any]]:
    """The last blocks of a packed file that with `known` records are `most` or more, in order; up to step `until`.

    Raises OSError, ValueError.
    """
    found: list[NDArray[Any]] = []
    with open(open_file(path), "rb") as file:
        if file.readline(_LONGEST_HEADER) != line:
            raise ValueError(f"{path.name} does not begin with the same line")
        places, end = [], os.fstat(file.fileno()).st_size
        while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
            records, size, first = _BLOCK.unpack(head)
            if file.tell() + size > end:
                break  # its rank was killed while it wrote this one
            if records * kind.itemsize > _LARGEST_BLOCK:
                raise ValueError(f"{path.name} is damaged")
            if until is None or first <= until:
                places.append((file.tell(), records, size))
            file.seek(size, os.SEEK_CUR)
        for place, records, size in reversed(places):
            if most is not None and known + sum(map(len, found)) >= most:
                break
            file.seek(place)
            try:
                data = zstandard.ZstdDecompressor().decompress(file.read(size), records * kind.itemsize)
            except zstandard.ZstdError as error:
                raise ValueError(f"{path.name} is damaged: {error}") from None
            if len(data) != records * kind.itemsize:
                raise ValueError(f"{path.name} is damaged")
            words = np.frombuffer(data, np.uint8).reshape(-1, records).T.copy().view("<u4")
            words[:, 0] = np.cumsum(words[:, 0], dtype=np.uint32)
            block = np.frombuffer(words.tobytes(), kind)
            found.insert(0, block if until is None else block[block["step"] <= until])
    return found


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
