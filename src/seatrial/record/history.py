"""The steps of a run as a view needs them, taken in one by one: a run may have a million, and grows while it is watched."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord

_COLUMNS = ("loss", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "time")

PACE_WINDOW = 50  # steps
_LONGEST = 3.0  # times the median: a step that took longer counts as so much


class History:
    """The steps that led to where the run stands.

    Whoever goes back to step 50, a later generation or a rollback, takes back what was done after it: until they are
    done again, those steps are in the file and are not part of the run.
    """

    def __init__(self) -> None:
        self.first: MetricsRecord | None = None
        self.last: MetricsRecord | None = None
        self.steps: list[int] = []
        self.generations: list[int] = []  # never falling
        self._columns = {name: array("d") for name in _COLUMNS}

    def take(self, record: MetricsRecord) -> None:
        """The next record of metrics.jsonl."""
        if self.generations and record.generation < self.generations[-1]:
            return  # of a course that was left
        if self.steps and record.step <= self.steps[-1]:
            keep = bisect_left(self.steps, record.step)
            del self.steps[keep:], self.generations[keep:]
            for column in self._columns.values():
                del column[keep:]
        if not self.steps:
            self.first = record
        self.last = record
        self.steps.append(record.step)
        self.generations.append(record.generation)
        for name, column in self._columns.items():
            column.append(getattr(record, name))

    def column(self, name: str, since: int = 0) -> Sequence[float]:
        """The field `name` of the steps that generation `since` and later ones did, by step."""
        return self._columns[name][bisect_left(self.generations, since) :]


class Pace:
    """How long a step takes at present: what every ETA is made of.

    The mean of the last steps, of which none counts as more than three times their median: one that a hiccup stretched
    changes little, and those that are always slow, as every tenth that is verified and copied, count. The first step of
    a generation (compilation, connections) does not count at all.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW)  # generation, seconds
        self._generation = 0  # of the last record

    def take(self, record: MetricsRecord) -> None:
        """The next record of metrics.jsonl."""
        began, self._generation = record.generation != self._generation, record.generation
        if not began and math.isfinite(record.step_time_s):
            self._recent.append((record.generation, record.step_time_s))

    def eta_s(self, steps_left: int, since: int = 0) -> float | None:
        """Seconds for so many steps at the pace of the start that began with generation `since`; None: not known yet."""
        seconds = [s for generation, s in self._recent if generation >= since]
        if not seconds:
            return None
        most = _LONGEST * median(seconds)
        return math.fsum(min(s, most) for s in seconds) / len(seconds) * max(0, steps_left)


class LedgerBook:
    """What a view tells of the ledger, kept up line by line as long as nothing in it is odd."""

    def __init__(self) -> None:
        self.odd = False  # then `ledger_gaps` has to look at all of it
        self.steps = 0
        self.skipped: set[int] = set()  # steps that were left out on purpose
        self._generations: list[int] = []  # of step n at n - 1
        self._last: dict[int, int] = {}  # generation -> its last step
        self.batch: int | None = None  # samples of its first step

    def take(self, record: LedgerRecord) -> None:
        """The next record of ledger.jsonl."""
        step, generation, done = record.step, record.generation, self._generations
        size = record.end_sample - record.first_sample
        self.batch = self.batch or size
        right = step > 0 and size == self.batch and record.first_sample == (step - 1) * size
        if done and generation < done[-1]:  # of a course that was left, by ranks that had not heard of it yet
            self.odd |= not right or step != self._last.get(generation, 0) + 1
            self._last[generation] = step
            return
        again = 0 < step <= len(done)
        if again and generation > done[-1]:  # it went back to before this step
            del done[step - 1 :]
            self.skipped = {s for s in self.skipped if s < step}
            again = False
        once = step == len(done) + 1
        if again and generation > done[step - 1]:  # its first time in this generation, after a rollback
            done[step - 1], once = generation, True
            self.skipped.discard(step)
        # In one generation a step may be trained, taken back and left out, or left out again; nothing else comes twice.
        self.odd |= not right or not (once or (again and record.skipped))
        if once and not again:
            done.append(generation)
        if record.skipped:
            self.skipped.add(step)
        self.steps = len(done)
        self._last[generation] = step
