"""ranks/GENERATION/rankN.collectives.jsonl: the number and bytes of one rank's collectives in each step, by dimension.

Nearly all steps of a run are equal, so a line applies from its step on until the next line; if every tenth step is
different, as when weights are compared, the line contains that too. Absent in older run folders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from seatrial.record import jsonl
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import LineWriter, Problem
from seatrial.record.typed import decode

Counted = Mapping[str, tuple[int, int]]  # stage -> (calls, bytes)


@dataclass(frozen=True)
class Issued:
    """Collectives of one dimension in one step of one rank, or on average over several."""

    calls: float
    bytes: (
        float  # of whole messages: the tensor gathered, scattered or summed, or one tensor sent or received
    )
    ranks: int | None  # per group; None if along no dimension

    @property
    def message_bytes(self) -> float:
        """Bytes per call."""
        return self.bytes / self.calls


@dataclass(frozen=True)
class StepCollectives:
    """The collectives of each step from `step` on: `then` if the step is `at` modulo `every`, else `issued`."""

    step: int
    issued: dict[str, Issued]  # name of a stage of waiting, or "save"
    every: int = 0  # 0: there are no such steps
    at: int = 0
    then: dict[str, Issued] | None = None

    def among(self, first: int, last: int) -> list[tuple[int, dict[str, Issued]]]:
        """(number of steps, what each of them issued) for the steps `first` to `last`."""
        steps = max(0, last + 1 - first)
        if not self.every or self.then is None:
            return [(steps, self.issued)]
        others = (last - self.at) // self.every - (first - 1 - self.at) // self.every if steps else 0
        return [(steps - others, self.issued), (others, self.then)]


@dataclass(frozen=True)
class _Period:
    """Every nth step is different."""

    usual: Counted
    every: int
    at: int
    then: Counted


class CollectivesWriter:
    """Appends a line to the file of one rank where a step differs from the expected, or is repeated. Raises OSError."""

    def __init__(self, folder: RunFolder, generation: int, rank: int, ranks: Mapping[str, int]) -> None:
        """`ranks`: dimension -> size of its groups."""
        self._lines = LineWriter(folder.collectives(generation, rank))
        self._ranks = ranks
        self._line: Counted | None = None  # content of the last line
        self._period: _Period | None = None  # period of the last line
        self._seen: _Period | None = None  # the last one seen, which continues after a save
        self._recent: tuple[Counted | None, Counted | None] = (None, None)  # the two steps before
        self._odd: tuple[int, Counted, Counted] | None = None  # the last single step that differed; the usual
        self._step = 0

    def add(self, step: int, counted: Counted) -> None:
        """Record the collectives of `step`: stage -> (calls, bytes)."""
        next_one, self._step = step == self._step + 1, step
        if not next_one:
            self._recent, self._odd, self._seen = (None, None), None, None
        older, last = self._recent
        self._recent = last, counted
        if last is not None and older == counted != last:
            self._returned(step - 1, last, counted)
        period = self._period
        due = period is not None and step % period.every == period.at
        expected = period.then if period is not None and due else self._line
        if next_one and counted == expected:
            return
        seen = self._seen
        # A line applies from its own step on, so this step must not be an exception by its period.
        if due or (seen is not None and counted == seen.usual and step % seen.every == seen.at):
            seen = self._seen = None
        self._period = seen if seen is not None and seen.usual == counted else None
        self._line = counted
        values: dict[str, Any] = {"step": step, "issued": self._issued(counted)}
        if (period := self._period) is not None:
            values |= {"every": period.every, "at": period.at, "then": self._issued(period.then)}
        self._lines.write(values)

    def _returned(self, step: int, odd: Counted, usual: Counted) -> None:
        """The steps are as usual again after `step`, which alone differed: the second time makes it a period."""
        last, self._odd = self._odd, (step, odd, usual)
        if last is not None and last[1:] == (odd, usual) and step - last[0] > 1:
            every = step - last[0]
            self._seen = _Period(usual, every, step % every, odd)

    def _issued(self, counted: Counted) -> dict[str, Any]:
        return {name: asdict(Issued(*count, self._ranks.get(name))) for name, count in counted.items()}

    def close(self) -> None:
        self._lines.close()


def read_collectives(
    folder: RunFolder, generation: int
) -> tuple[dict[int, list[StepCollectives]], list[Problem]]:
    """Rank -> its record, steps increasing, and what cannot be used. A repeated step counts as last recorded."""
    found: dict[int, list[StepCollectives]] = {}
    problems: list[Problem] = []
    for rank in folder.ranks_with(generation, ".collectives.jsonl"):
        path = folder.collectives(generation, rank)
        values, wrong = jsonl.read_numbered(path)
        problems += wrong
        kept = found[rank] = []
        for number, value in values:
            try:
                line = decode(StepCollectives, value)
                every = [*line.issued.values(), *(line.then or {}).values()]
                if not all(0 < i.calls < math.inf and 0 <= i.bytes < math.inf for i in every):
                    raise ValueError("calls or bytes that cannot be")
            except (ValueError, TypeError) as error:
                problems.append(Problem(path.name, number, f"not used: {error}"))
                continue
            while kept and kept[-1].step >= line.step:
                kept.pop()
            kept.append(line)
    return {rank: lines for rank, lines in found.items() if lines}, problems


def of_a_step(found: Mapping[int, Sequence[StepCollectives]], first: int, last: int) -> dict[str, Issued]:
    """Dimension -> its collectives in a step of one rank: the mean over all ranks and the steps `first` to `last`."""
    sums: dict[str, tuple[float, float, int | None]] = {}
    share = 1 / (len(found) * (last + 1 - first)) if found else 0.0
    for lines in found.values():
        ends = [line.step for line in lines[1:]] + [last + 1]
        for line, end in zip(lines, ends, strict=True):
            for steps, issued in line.among(max(line.step, first), min(end - 1, last)):
                part = share * steps
                for name, each in issued.items() if part else ():
                    calls, size, _ = sums.get(name, (0.0, 0.0, None))
                    sums[name] = calls + part * each.calls, size + part * each.bytes, each.ranks
    return {name: Issued(*each) for name, each in sums.items()}
