"""Rank 0's checkpoint timing: how much training is unsaved, when to retry, and how often to save."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from statistics import median

from seatrial.hardware.failures import RATES
from seatrial.job import Job
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.interval import Interval, choose_interval, count_failures, write_interval
from seatrial.record.recent import recent_metrics

# Prior failure rate: Meta's for Llama 3, the largest run on current hardware with published interruptions.
_PRIOR = next(rate for rate in RATES if rate.name == "llama-3")
# Steps until the first save of a run that chooses its interval, to measure what a save costs.
_FIRST_STEPS = 10
_RECORDS = 4096  # recent metrics records that are searched for unsaved steps
_RETRY_S, _RETRY_MOST = 30.0, 8  # first back-off after a failure; it doubles, up to 1/8 of max_unsaved_s
_RECENT = 32  # steps whose median is the usual step time
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Cost:
    """The size of a checkpoint, and the interval chosen after it, if that changed."""

    bytes: int
    interval: Interval | None


class CheckpointCadence:
    """The checkpoint timing of one generation. Times are local to this process; only rank 0's count."""

    def __init__(self, job: Job, folder: RunFolder, *, writes: bool) -> None:
        self._job, self._folder, self._writes = job, folder, writes
        self._auto = job.checkpoint.every_steps == "auto"
        self.first_steps = _FIRST_STEPS
        self.interval = 0  # steps, as last chosen; 0: not chosen yet, or fixed by the job
        self._risk_since = time.monotonic()
        self._retry_at: float | None = None
        self._failures = 0  # in a row
        self._bytes = 0
        self._steps: list[float] = []  # seconds of the last steps
        self._steps_while_saving: list[float] = []
        self._started_at = time.monotonic()

    @property
    def removal_reason(self) -> str:
        """Why an old checkpoint is removed."""
        also = self._job.checkpoint.keep_every_steps
        text = f"the newest {self._job.checkpoint.keep} are kept"
        return text + (f", and every {also} steps" if also else "")

    def start(self, first_step: int, newest: int) -> None:
        """Start timing; `newest` is the newest checkpoint's step, 0 for none: training since then is unsaved."""
        at_risk = 0.0
        if self._writes and newest < first_step - 1:
            at_risk = sum(
                record.step_time_s
                for record in recent_metrics(self._folder, min(_RECORDS, first_step))
                if newest < record.step < first_step
            )
        self._started_at = time.monotonic()
        self._risk_since = self._started_at - at_risk

    def record_step(self, seconds: float, *, saving: bool) -> None:
        """Record that a step took `seconds`; `saving`: a checkpoint was being written meanwhile."""
        times = self._steps_while_saving if saving else self._steps
        times.append(seconds)
        del times[:-_RECENT]

    def at_risk_s(self, step_s: float) -> float:
        """Seconds of unsaved training once the next step is done."""
        return time.monotonic() - self._risk_since + step_s

    @property
    def wants_save(self) -> bool:
        """Whether to save before one is due: to retry after a failure, or because half of `max_unsaved_s` is used."""
        now = time.monotonic()
        if self._retry_at is not None:
            return now >= self._retry_at
        return now - self._risk_since >= self._job.checkpoint.max_unsaved_s / 2

    def record_size(self, size: int) -> None:
        """Record the size of a checkpoint, in bytes."""
        self._bytes = size

    def failed(self) -> None:
        """Record a failed save, and schedule the retry."""
        limit = self._job.checkpoint.max_unsaved_s / _RETRY_MOST
        self._retry_at = time.monotonic() + min(_RETRY_S * 2**self._failures, limit)
        self._failures += 1

    def rolled_back(self, step: int) -> None:
        """Restart timing after a rollback to the state after `step`."""
        self.start(step + 1, step)  # nothing is unsaved: the discarded steps are already lost

    def saved(self, step: int, *, age_s: float, stalled_s: float) -> Cost:
        """Record a complete checkpoint of `step`; its state is `age_s` old, and training waited `stalled_s` for it."""
        self._failures, self._retry_at = 0, None
        self._risk_since = time.monotonic() - age_s
        interval = self._choose(age_s, stalled_s) if self._auto and self._writes else None
        self._steps_while_saving.clear()
        return Cost(self._bytes, interval)

    def _choose(self, write_s: float, stalled_s: float) -> Interval | None:
        if not self._steps:
            return None
        usual = median(self._steps)
        slower = sum(max(0.0, seconds - usual) for seconds in self._steps_while_saving)
        nodes = self._job.cluster.nodes
        found = read_events(self._folder)[0]
        trained_s = time.monotonic() - self._started_at if not found else time.time() - found[0].time
        chosen = choose_interval(
            save_cost_s=stalled_s + slower,
            write_s=write_s,
            step_time_s=usual,
            nodes=nodes,
            failures=count_failures(found),
            node_days=nodes * max(0.0, trained_s) / _DAY_S,
            prior=_PRIOR,
            max_unsaved_s=self._job.checkpoint.max_unsaved_s,
        )
        with contextlib.suppress(OSError):  # the event reports it as well
            write_interval(self._folder, chosen)
        before, self.interval = self.interval, chosen.steps
        # Reported only if it changed by more than noise.
        return chosen if not before or abs(chosen.steps - before) > 0.1 * before else None
