"""ranks/GENERATION/rankN.collectives.jsonl: the number and bytes of one rank's collectives in each step, by dimension.

Nearly all steps of a run are alike, so a line holds from its step on until the next line, and one that equals an earlier
line names only its step: a thousand ranks would write a GB a day otherwise. Absent in older run folders.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seatrial.record import jsonl
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import LineWriter, Problem
from seatrial.record.typed import decode

_REMEMBERED = 16  # different lines to which a later one may refer
_NAME = re.compile(r"rank([0-9]{1,9})\.collectives\.jsonl")


@dataclass(frozen=True)
class Issued:
    """Collectives of one dimension in one step of one rank, or on average over several."""

    calls: float
    bytes: (
        float  # of the whole messages: what is gathered, scattered or summed, or one tensor sent or received
    )
    ranks: int | None  # of a group; None for what is along no dimension

    @property
    def message_bytes(self) -> float:
        """Of one call."""
        return self.bytes / self.calls


@dataclass(frozen=True)
class StepCollectives:
    """The collectives of every step from `step` on."""

    step: int
    issued: dict[str, Issued]  # name of a stage of waiting, or "save"


class CollectivesWriter:
    """Appends to the file of one rank, where a step differs from the one before or is repeated. Raises OSError."""

    def __init__(self, folder: RunFolder, generation: int, rank: int, ranks: Mapping[str, int]) -> None:
        """`ranks`: dimension -> size of its groups."""
        self._lines = LineWriter(folder.collectives(generation, rank))
        self._ranks = ranks
        self._last: Mapping[str, tuple[int, int]] | None = None
        self._written: dict[int, Mapping[str, tuple[int, int]]] = {}  # step of a line -> what it holds
        self._step = 0

    def add(self, step: int, counted: Mapping[str, tuple[int, int]]) -> None:
        """Stage -> (calls, bytes) of `step`."""
        again, self._step = step <= self._step, step
        if counted == self._last and not again:
            return
        self._last = counted
        like = next((step for step, each in self._written.items() if each == counted), None)
        if like is not None:
            self._lines.write({"step": step, "like": like})
            return
        if len(self._written) >= _REMEMBERED:
            self._written.clear()
        self._written[step] = counted
        issued = {name: Issued(*count, self._ranks.get(name)) for name, count in counted.items()}
        self._lines.write(asdict(StepCollectives(step, issued)))

    def close(self) -> None:
        self._lines.close()


def read_collectives(
    folder: RunFolder, generation: int
) -> tuple[dict[int, list[StepCollectives]], list[Problem]]:
    """Rank -> its record, steps increasing, and what cannot be used. A repeated step counts as last recorded."""
    found: dict[int, list[StepCollectives]] = {}
    problems: list[Problem] = []
    try:
        names = sorted(os.listdir(folder.ranks / f"{generation:06d}"))
    except OSError:
        return found, problems
    for name in names:
        if (match := _NAME.fullmatch(name)) is None:
            continue
        values, wrong = jsonl.read_numbered(folder.collectives(generation, int(match[1])))
        problems += wrong
        kept = found[int(match[1])] = []
        full: dict[int, dict[str, Any]] = {}  # step -> its newest line that is not like another
        for number, value in values:
            try:
                line = decode(StepCollectives, value if "like" not in value else _as(value, full))
                if not all(0 < i.calls < math.inf and 0 <= i.bytes < math.inf for i in line.issued.values()):
                    raise ValueError("calls or bytes that cannot be")
            except (ValueError, TypeError) as error:
                problems.append(Problem(name, number, f"not used: {error}"))
                continue
            if "like" not in value:
                full[line.step] = value
            while kept and kept[-1].step >= line.step:
                kept.pop()
            kept.append(line)
    return {rank: lines for rank, lines in found.items() if lines}, problems


def _as(value: Mapping[str, Any], full: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A line that is like an earlier one, with what that one holds. Raises ValueError."""
    earlier = full.get(value["like"]) if type(value["like"]) is int else None
    if earlier is None:
        raise ValueError(f"there is no usable line of step {value['like']!r:.20} before it")
    return {**earlier, "step": value.get("step")}


def of_a_step(found: Mapping[int, Sequence[StepCollectives]], first: int, last: int) -> dict[str, Issued]:
    """Dimension -> its collectives in a step of one rank: the mean over all ranks and the steps `first` to `last`."""
    sums: dict[str, tuple[float, float, int | None]] = {}
    share = 1 / (len(found) * (last + 1 - first)) if found else 0.0
    for lines in found.values():
        ends = [line.step for line in lines[1:]] + [last + 1]
        for line, end in zip(lines, ends, strict=True):
            part = share * max(0, min(end, last + 1) - max(line.step, first))
            for name, each in line.issued.items() if part else ():
                calls, size, _ = sums.get(name, (0.0, 0.0, None))
                sums[name] = calls + part * each.calls, size + part * each.bytes, each.ranks
    return {name: Issued(*each) for name, each in sums.items()}
