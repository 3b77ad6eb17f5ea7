"""How long a step may take before the run counts as hung: learned from the run's own steps. Pure; has no clock.

    limit = max(min_s, factor x median of the last steps)

While the batch grows (`train.batch_ramp`) durations are scaled to that of the step that is waited for.

The first step after a start takes longer without being a hang (reading, compiling, rendezvous): it has its own limit,
`factor` times the longest one seen so far, if any. A checkpoint is written in parallel with the steps and adds nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from seatrial.base.batches import BatchSizes

# Enough that one slow step does not move the median, few enough to follow a change within minutes.
_STEPS = 32


class StepDeadline:
    """When the current step is overdue. Times are seconds on one clock of the caller's choice."""

    def __init__(self, *, min_s: float, factor: float, first_step_s: float, batches: BatchSizes) -> None:
        self._min_s, self._factor, self._first_step_s = min_s, factor, first_step_s
        self._batches = batches
        # Seconds, as with the largest batch: of steps; of the first one of a generation, by which the others are guessed until
        # there is another; from a generation's start to its first step's end, at most (0: none was seen).
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._first_took: float | None = None
        self._longest_first = 0.0
        self._share = 1.0  # of the largest batch that the awaited step has
        self._since: float | None = None  # None: no step is expected
        self._step: int | None = None  # the last one completed in this generation
        self._whole = False

    def begin(self, now: float, *, whole: bool = False) -> None:
        """A generation starts: its first step has its own limit. Learned durations are kept.

        `whole`: it gets all of `first_step_s`, however long earlier ones took.
        """
        self._since, self._step, self._whole = now, None, whole

    def extend(self, now: float, *, whole: bool = False) -> None:
        """Ranks do something else between two steps and have come on with it: the limit counts from now.

        `whole`: until the next news the limit is all of `first_step_s`.
        """
        if self._since is not None:
            self._since, self._whole, self._share = now, whole, 1.0

    def end(self) -> None:
        """No step is expected until the next generation begins."""
        self._since = self._step = None

    def progress(self, now: float, step: int, seconds: float | None = None) -> bool:
        """Record that all steps up to `step` are completed; return whether that is news.

        `seconds` is the duration of the last one by the rank's own clock. Without it the time since the last news is
        divided evenly among the steps, which is the more accurate the more often news arrives.
        """
        if self._since is None or (self._step is not None and step <= self._step):
            return False
        gap, batches = now - self._since, self._batches
        share = batches.size(step) / batches.largest
        if self._step is None:
            self._first_took = (gap if seconds is None else seconds) / share
            self._longest_first = max(self._longest_first, gap / share)
        else:
            shares = (batches.total(step) - batches.total(self._step)) / batches.largest
            self._steps.append(gap / shares if seconds is None else seconds / share)
        self._since, self._step, self._whole = now, step, False
        self._share = batches.size(step + 1) / batches.largest
        return True

    def _usual(self) -> float | None:
        return median(self._steps) if self._steps else self._first_took

    @property
    def limit_s(self) -> float:
        """Seconds that may pass between the last news and the next."""
        usual = self._usual()
        if self._step is None or usual is None or self._whole:
            return self._first_limit_s
        return max(self._min_s, self._factor * usual * self._share)

    @property
    def _first_limit_s(self) -> float:
        """The limit of a first step; once the run has seen one, it may be less than all of `first_step_s`."""
        if self._whole or not self._longest_first:
            return self._first_step_s
        return min(self._first_step_s, max(self._min_s, self._factor * self._longest_first))

    @property
    def waited_for(self) -> int | None:
        """The current step; None before the first one of a generation is known."""
        return None if self._step is None else self._step + 1

    def at(self) -> float | None:
        """When the current step becomes overdue; None while no step is expected."""
        return None if self._since is None else self._since + self.limit_s

    def overdue(self, now: float) -> float | None:
        """Seconds since the last news if the current step is overdue, else None."""
        at = self.at()
        if at is None or self._since is None or now < at:
            return None
        return now - self._since
