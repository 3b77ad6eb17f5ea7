"""Pushes a run from its folder to a tracker, resuming an earlier attempt, and follows it while it runs."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from seatrial.base.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError, RunFailed
from seatrial.base.files import flat, parse_toml, read_text
from seatrial.job.trackers import TRACKERS
from seatrial.record import events, lock, metrics
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem, Tail
from seatrial.record.launches import known_launch, read_outcome
from seatrial.record.metrics import MetricsRecord
from seatrial.record.running import running
from seatrial.record.states import State
from seatrial.record.typed import decode_all
from seatrial.record.view import read_brief
from seatrial.watch.trackers.progress import Progress, read_progress, write_progress
from seatrial.watch.trackers.tracker import TrackedRun, Tracker, values_of

POLL_S = 1.0
_BEAT_S = 2.0  # maximum interval between writes of the progress file, which also serve as heartbeat

# Pushed in addition to warnings and errors.
_KINDS = frozenset(
    [
        "run_started",
        "run_finished",
        "generation_started",
        "recovered",
        "grown",
        "checkpoint_saved",
        "alert",
        "job_changed",
    ]
)


_ENDED: dict[int, State] = {EXIT_DONE: "finished", EXIT_PREEMPTED: "preempted", EXIT_INTERRUPTED: "stopped"}


@dataclass(frozen=True)
class Pushed:
    """How much was pushed."""

    steps: int
    events: int
    id: str | None


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def feed(
    folder: RunFolder,
    name: str,
    *,
    poll_s: float = POLL_S,
    report: Callable[[str], None] = print,
    wait: Callable[[float], bool] = _sleep,
) -> Pushed:
    """Push what the tracker `name` does not have yet, and follow a live run to its end.

    `wait` sleeps for the given seconds; it returns true, perhaps earlier, if the run is over although still locked.
    Raises InputError if there is no such tracker or its package is missing; RunFailed if another process does the
    same; whatever the tracker raises.
    """
    make = _class_of(name)
    with _only_one(folder, name):
        pushing = _Feed(folder, name, read_progress(folder, name), report)
        if not pushing.has_news and running(folder) is None:
            return pushing.pushed
        pushing.begin(make)
        over = False
        while True:
            # Before reading, so that nothing written before the end is missed.
            alive = not over and running(folder) is not None
            if pushing.push():
                continue
            if not alive:
                break
            pushing.beat()
            over = wait(poll_s)
        pushing.end(_state(folder))
        return pushing.pushed


def _state(folder: RunFolder) -> State:
    """How the run ended. While its processes still exit, only the outcome has it."""
    state = read_brief(folder).state
    launch = known_launch(folder)
    outcome = None if launch is None else read_outcome(folder, launch.generation)
    if state != "running" or outcome is None:
        return state
    return _ENDED.get(outcome.exit_code, "failed")


def _class_of(name: str) -> Callable[[TrackedRun], Tracker]:
    entry = TRACKERS.named(name)
    try:
        made: Callable[[TrackedRun], Tracker] = TRACKERS.imported(name, entry.path)
    except InputError as error:
        raise InputError(error.message, hint=entry.install) from error
    return made


@contextlib.contextmanager
def _only_one(folder: RunFolder, name: str) -> Iterator[None]:
    try:
        folder.trackers.mkdir(parents=True, exist_ok=True)
        fd = lock.acquire(folder.trackers / f"{name}.lock")
    except lock.LockHeld as held:
        raise RunFailed(
            f"process {held.pid} already pushes {folder.path} to {name}",
            hint="the run's own monitor does, if the job names it in watch.trackers",
        ) from None
    except OSError as error:
        raise RunFailed(
            f"{folder.trackers} cannot be written ({error.strerror}): progress could not be recorded",
            hint="push from a writable copy of the run folder",
        ) from error
    with open(fd, "rb"):
        yield


class _Feed:
    """One tracker's process."""

    def __init__(
        self, folder: RunFolder, name: str, progress: Progress, report: Callable[[str], None]
    ) -> None:
        self._folder, self._name, self._progress, self._report = folder, name, progress, report
        self._metrics = Tail(folder.metrics, metrics.NOUN, begin=progress.metrics_bytes)
        self._events = Tail(folder.events, events.NOUN)
        self._skip = progress.events
        self._tracker: Tracker | None = None
        self._steps = self._events_pushed = 0
        self._written = 0.0

    @property
    def pushed(self) -> Pushed:
        return Pushed(self._steps, self._events_pushed, self._progress.id)

    @property
    def has_news(self) -> bool:
        """Whether new records, or the end of the run, are still to be pushed."""
        if not self._progress.ended:
            return True
        try:
            size = self._folder.metrics.stat().st_size
        except OSError:
            size = 0
        return size != self._progress.metrics_bytes

    def begin(self, make: Callable[[TrackedRun], Tracker]) -> None:
        p, folder = self._progress, self._folder
        config: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # still push a run of another version
            config = flat(parse_toml(read_text(folder.job_toml)))
        path = folder.path.absolute()
        self._tracker = make(TrackedRun(path.name, path, config, p.id, p.step))
        p.id, p.ended = self._tracker.id, False
        self._write()
        self._report(f"pushing {path} to {self._name} as {p.id}, from step {p.step + 1}")

    def push(self) -> bool:
        """Push new records; returns whether there were any."""
        tracker, p = self._tracker, self._progress
        assert tracker is not None
        waiting = deque(self._new_events())
        news = bool(waiting)
        for part in self._metrics.parts():
            records, wrong = decode_all(MetricsRecord, part, file=self._metrics.path.name, noun=metrics.NOUN)
            self._report_problems(self._metrics, wrong)
            for record in records:
                while waiting and waiting[0].time <= record.time:
                    self._push_event(tracker, waiting.popleft())
                tracker.log_step(record, values_of(record))
                p.step = record.step
            self._steps += len(records)
            tracker.flush()
            p.metrics_bytes = self._metrics.offset
            self._write()
            news = True
        while waiting:
            self._push_event(tracker, waiting.popleft())
        if news:
            tracker.flush()
            self._write()
        return news

    def _new_events(self) -> list[Event]:
        numbered = self._events.poll_numbered()
        found, wrong = decode_all(Event, numbered, file=self._events.path.name, noun=events.NOUN)
        self._report_problems(self._events, wrong)
        skip, self._skip = self._skip, max(0, self._skip - len(found))
        return found[skip:]

    def _push_event(self, tracker: Tracker, event: Event) -> None:
        p = self._progress
        p.events += 1
        if event.severity == "info" and event.kind not in _KINDS:
            return
        p.counts[event.kind] = p.counts.get(event.kind, 0) + 1
        tracker.log_event(event, p.step, p.counts[event.kind])
        self._events_pushed += 1

    def _report_problems(self, tail: Tail, wrong: list[Problem]) -> None:
        for problem in [*tail.problems, *wrong]:
            self._report(f"warning: not pushed: {problem}")
        tail.problems.clear()

    def beat(self) -> None:
        if time.monotonic() - self._written >= _BEAT_S:
            self._write()

    def end(self, state: State) -> None:
        """Set the end status if it is known; else the next process continues."""
        assert self._tracker is not None
        if state not in ("running", "queued"):
            self._tracker.end(state)
            self._progress.ended = True
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._progress.time = time.time()
        write_progress(self._folder, self._name, self._progress)
