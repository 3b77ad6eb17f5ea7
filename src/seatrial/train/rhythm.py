"""Rank 0's clock of checkpoints: how much training is at risk, when to try again, and how often to save."""

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

# Meta's for Llama 3: the largest run on current hardware that published its interruptions.
_PRIOR = next(rate for rate in RATES if rate.name == "llama-3")
_FIRST_STEPS = (
    10  # after which a run that chooses its interval saves for the first time, to see what it costs
)
_LOOK_BACK = 4096  # steps among which those without a checkpoint are looked for
_RETRY_S, _RETRY_MOST = 30.0, 8  # the first wait after a failure; it doubles, to 1/8 of max_unsaved_s
_RECENT = 32  # steps whose median is the usual one
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Cost:
    """What a checkpoint was, and the interval that follows, where it changed."""

    bytes: int
    interval: Interval | None


class Rhythm:
    """Of one leg. Times are this process's own; only rank 0's count."""

    def __init__(self, job: Job, folder: RunFolder, *, writes: bool) -> None:
        self._job, self._folder, self._writes = job, folder, writes
        self._auto = job.checkpoint.every_steps == "auto"
        self.first_steps = _FIRST_STEPS
        self.interval = 0  # steps, as chosen last; 0: not yet, or the job says it
        self._risk_since = time.monotonic()
        self._retry_at: float | None = None
        self._failures = 0  # in a row
        self._bytes = 0
        self._steps: list[float] = []  # seconds of the last steps
        self._beside: list[float] = []  # the same of those that a save was written beside
        self._began = time.monotonic()

    @property
    def kept(self) -> str:
        """Why an old checkpoint goes."""
        also = self._job.checkpoint.keep_every_steps
        text = f"the newest {self._job.checkpoint.keep} are kept"
        return text + (f", and every {also} steps" if also else "")

    def start(self, first_step: int, newest: int) -> None:
        """`newest`: the step of the newest checkpoint, 0 for none. What was trained after it is at risk already."""
        at_risk = 0.0
        if self._writes and newest < first_step - 1:
            at_risk = sum(
                record.step_time_s
                for record in recent_metrics(self._folder, min(_LOOK_BACK, first_step))
                if newest < record.step < first_step
            )
        self._began = time.monotonic()
        self._risk_since = self._began - at_risk

    def stepped(self, seconds: float, *, saving: bool) -> None:
        """A step took `seconds`; `saving`: a checkpoint was being written meanwhile."""
        times = self._beside if saving else self._steps
        times.append(seconds)
        del times[:-_RECENT]

    def at_risk_s(self, step_s: float) -> float:
        """Seconds of training that are in no checkpoint once the next step is done."""
        return time.monotonic() - self._risk_since + step_s

    @property
    def wants_save(self) -> bool:
        """Whether to save before one is due: to try again after a failure, or because half the limit is spent."""
        now = time.monotonic()
        if self._retry_at is not None:
            return now >= self._retry_at
        return now - self._risk_since >= self._job.checkpoint.max_unsaved_s / 2

    def wrote(self, size: int) -> None:
        """A checkpoint has `size` bytes."""
        self._bytes = size

    def failed(self) -> None:
        """A checkpoint could not be saved."""
        limit = self._job.checkpoint.max_unsaved_s / _RETRY_MOST
        self._retry_at = time.monotonic() + min(_RETRY_S * 2**self._failures, limit)
        self._failures += 1

    def went_back(self, step: int) -> None:
        """To the state after `step`."""
        self.start(step + 1, step)  # what is lost is lost; what follows is new

    def saved(self, step: int, *, age_s: float, stalled_s: float) -> Cost:
        """The checkpoint of `step` is complete; its state is `age_s` old, and training waited `stalled_s` for it."""
        self._failures, self._retry_at = 0, None
        self._risk_since = time.monotonic() - age_s
        interval = self._choose(age_s, stalled_s) if self._auto and self._writes else None
        self._beside.clear()
        return Cost(self._bytes, interval)

    def _choose(self, write_s: float, stalled_s: float) -> Interval | None:
        if not self._steps:
            return None
        usual = median(self._steps)
        slower = sum(max(0.0, seconds - usual) for seconds in self._beside)
        nodes = self._job.cluster.nodes
        found = read_events(self._folder)[0]
        trained_s = time.monotonic() - self._began if not found else time.time() - found[0].time
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
        with contextlib.suppress(OSError):  # told by the event as well
            write_interval(self._folder, chosen)
        before, self.interval = self.interval, chosen.steps
        # Told only where it changed by more than noise.
        return chosen if not before or abs(chosen.steps - before) > 0.1 * before else None
