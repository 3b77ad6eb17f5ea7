"""The steps of a run for its views, read incrementally: a run may have a million steps and grow while it is watched."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from seatrial.base.batches import BatchSizes
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord

if TYPE_CHECKING:
    from seatrial.record.bulk import Columns

_COLUMNS = ("loss", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "time", "validation_loss")

PACE_WINDOW = 50
_LONGEST = 3.0  # times the median: longer steps are capped at this


class History:
    """The steps that led to the current state of a run.

    A later generation, or a rollback, that repeats step 50 discards the steps recorded after it: they stay in the file
    but are not part of the run until they are done again.
    """

    def __init__(self) -> None:
        self.first: MetricsRecord | None = None
        self.last: MetricsRecord | None = None
        self.steps: list[int] = []
        self.generations: list[int] = []  # non-decreasing
        self.validation: list[tuple[int, float]] = []  # (step, validation loss) where it is finite, by step
        self._columns = {name: array("d") for name in _COLUMNS}

    def add(self, record: MetricsRecord) -> None:
        """Add the next record of metrics.jsonl."""
        if self.generations and record.generation < self.generations[-1]:
            return  # from an abandoned generation
        self._discard(record.step)
        if not self.steps:
            self.first = record
        self.last = record
        self.steps.append(record.step)
        self.generations.append(record.generation)
        for name, column in self._columns.items():
            value = getattr(record, name)
            column.append(math.nan if value is None else value)
        if record.validation_loss is not None and math.isfinite(record.validation_loss):
            self.validation.append((record.step, record.validation_loss))

    def add_columns(self, found: Columns, record: Callable[[int], MetricsRecord]) -> None:
        """Add many records at once, as `add` would one by one; `record` gives the one at a place."""
        steps, generations = found["step"], found["generation"]
        breaks = (steps[1:] <= steps[:-1]) | (generations[1:] != generations[:-1])
        last = None
        for begin, end in pairwise([0, *(breaks.nonzero()[0] + 1).tolist(), len(steps)]):
            if self.generations and generations[begin] < self.generations[-1]:
                continue  # from an abandoned generation
            self._discard(int(steps[begin]))
            if not self.steps:
                self.first = record(begin)
            last = end - 1
            self.steps += steps[begin:end].tolist()
            self.generations += generations[begin:end].tolist()
            for name, column in self._columns.items():
                column.frombytes(found[name][begin:end].tobytes())
            losses = found["validation_loss"][begin:end]
            at = (abs(losses) < math.inf).nonzero()[0]
            self.validation += zip(steps[begin:end][at].tolist(), losses[at].tolist(), strict=True)
        if last is not None:
            self.last = record(last)

    def _discard(self, step: int) -> None:
        """Discard the steps from `step` on."""
        if self.steps and step <= self.steps[-1]:
            keep = bisect_left(self.steps, step)
            del self.steps[keep:], self.generations[keep:]
            for column in self._columns.values():
                del column[keep:]
            del self.validation[bisect_left(self.validation, (step, -math.inf)) :]

    def column(self, name: str, since: int = 0, first: int = 0) -> Sequence[float]:
        """The field `name` of the steps from `first` on of generation `since` and later ones, by step; NaN where it is null."""
        begin = max(bisect_left(self.generations, since), bisect_left(self.steps, first))
        return self._columns[name][begin:]


class Pace:
    """The current step time, used for every ETA.

    The mean of the last steps' seconds a sample, each capped at three times their median: a single slow step changes little,
    while steps that are regularly slow (every tenth is verified and copied) count. The first step of a generation (compilation,
    connections) is excluded.
    """

    def __init__(self, batches: BatchSizes) -> None:
        self._batches = batches
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW)  # (generation, seconds a sample)
        self._generation = 0  # of the last record

    def add(self, generation: int, step: int, step_time_s: float) -> None:
        """Add the next record of metrics.jsonl."""
        new_generation, self._generation = generation != self._generation, generation
        if not new_generation and math.isfinite(step_time_s):
            self._append(generation, step, step_time_s)

    def add_columns(self, found: Columns) -> None:
        """Add many records at once."""
        generations, seconds = found["generation"], found["step_time_s"]
        usable = abs(seconds) < math.inf
        usable[1:] &= generations[1:] == generations[:-1]
        usable[0] &= generations[0] == self._generation
        for i in usable.nonzero()[0][-PACE_WINDOW:]:
            self._append(int(generations[i]), int(found["step"][i]), float(seconds[i]))
        self._generation = int(generations[-1])

    def _append(self, generation: int, step: int, seconds: float) -> None:
        self._recent.append((generation, seconds / self._batches.size(max(1, step))))

    def eta_s(self, step: int, total: int, since: int = 0) -> float | None:
        """Seconds from the end of `step` to that of `total`, at the pace of generation `since` and later ones; None: not known yet."""
        seconds = [s for generation, s in self._recent if generation >= since]
        if not seconds:
            return None
        most = _LONGEST * median(seconds)
        return (
            math.fsum(min(s, most) for s in seconds)
            / len(seconds)
            * max(0, self._batches.total(total) - self._batches.total(step))
        )


class LedgerSummary:
    """Incremental summary of the ledger, as long as it has no irregularity."""

    def __init__(self, batches: BatchSizes | None = None) -> None:
        """`batches`: if None, all are as large as the first."""
        self.odd = False  # irregular: `ledger_gaps` must read all of it
        self.steps = 0
        self.skipped: set[int] = set()  # steps skipped on purpose
        self._generations: list[int] = []  # of step n at n - 1
        self._last: dict[int, int] = {}  # generation -> its last step
        self.batches = batches

    def add_columns(self, found: Columns) -> None:
        """Add many records at once, as `add` would one by one."""
        steps, first, end, done = found["step"], found["first_sample"], found["end_sample"], self._generations
        # Left out by older versions.
        generations, skipped = (
            found["generation"],
            found["skipped"].astype(bool),
        )
        batches = self._assumed(int(end[0] - first[0]))
        right = (
            (first == batches.first_sample(steps)) & (end == batches.first_sample(steps + 1)) & (first < end)
        )
        plain = (steps > 0) & right & ~skipped
        breaks = (steps[1:] != steps[:-1] + 1) | (generations[1:] != generations[:-1])
        breaks |= ~plain[1:] | ~plain[:-1]
        for begin, stop in pairwise([0, *(breaks.nonzero()[0] + 1).tolist(), len(steps)]):
            at, generation = begin, int(generations[begin])
            while at < stop:
                step = int(steps[at])
                newest = done[-1] if done else generation
                follows = step == len(done) + 1 and generation >= newest
                if plain[at] and (follows or (generation > newest and step <= len(done))):
                    if step <= len(done):  # the new generation resumed before this step
                        del done[step - 1 :]
                        self.skipped = {s for s in self.skipped if s < step}
                    done += [generation] * (stop - at)
                    self.steps = len(done)
                    self._last[generation] = int(steps[stop - 1])
                    break
                self.add(LedgerRecord(step, int(first[at]), int(end[at]), generation, bool(skipped[at])))
                at += 1

    def _assumed(self, first: int) -> BatchSizes:
        self.batches = self.batches or BatchSizes.of(first)
        return self.batches

    def add(self, record: LedgerRecord) -> None:
        """Add the next record of ledger.jsonl."""
        step, generation, done = record.step, record.generation, self._generations
        samples = (record.first_sample, record.end_sample)
        right = step > 0 and samples == self._assumed(samples[1] - samples[0]).samples(step)
        # From an abandoned generation, by ranks that had not been stopped yet.
        if done and generation < done[-1]:
            self.odd |= not right or step != self._last.get(generation, 0) + 1
            self._last[generation] = step
            return
        again = 0 < step <= len(done)
        if again and generation > done[-1]:  # the new generation resumed before this step
            del done[step - 1 :]
            self.skipped = {s for s in self.skipped if s < step}
            again = False
        once = step == len(done) + 1
        if again and generation > done[step - 1]:  # first time in this generation, after a rollback
            done[step - 1], once = generation, True
            self.skipped.discard(step)
        # Within one generation only a skipped step may repeat one: trained, rolled back and skipped, or skipped again.
        self.odd |= not right or not (once or (again and record.skipped))
        if once and not again:
            done.append(generation)
        if record.skipped:
            self.skipped.add(step)
        self.steps = len(done)
        self._last[generation] = step
