"""A run's wall-clock time as pieces that do not overlap, each with one cause, from its events and the times of its steps.

docs/watch.md defines the causes. The pieces follow each other from the run's beginning to its end, so their sum is the
wall-clock time whatever the records contain; times that contradict the order (clocks of several hosts) are moved to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seatrial.record.events import Event
from seatrial.record.states import ENDS, NUMERIC_FAULTS, WAIT_REPORTED_S
from seatrial.record.step_log import StepLog

PRODUCTIVE, STRAGGLER, SHRUNK, QUEUE, START, WARM_UP = range(6)
DETECTION, RECOVERY, REDONE, RESHAPE, WAITING, CHECKPOINT, VALIDATION, ENDING, STOPPED, UNKNOWN = range(6, 16)

# Cause -> which time of an interruption it is: none of them, detection, recovery, redone steps.
_OF_FAILURE = (0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 2, 0, 0, 0, 0, 0)

# A record is made this late, or this share of a step, after its step at times.
_JITTER_S, _JITTER = 30e-3, 0.01
_UNFINISHED_SAVE_S = 600.0  # a longer pause is not taken for a save that left no event
_OVERDUE = 3.0  # medians of a step, after which a running step is not taken for work
_FAILED = ("recovering", "gave_up", "run_failed")
_AFTER_STEPS = (*_FAILED, *ENDS)  # of a generation
_BEFORE_STEPS = ("run_started", "coordinator_elected", "generation_started")
_OPENING = ("job_changed", "layout_chosen", "memory_planned")  # before `run_started`
_SAVES = ("checkpoint_saved", "checkpoint_failed", "checkpoint_late", "checkpoint_overdue")


@dataclass
class Interruption:
    """A failure and the time that it took from the run."""

    time: float  # when it was detected, unix seconds
    generation: int  # that it ended
    cls: str  # class of the policy, such as "process"; "unknown" where nothing names one
    signal: str | None
    cause: str
    node: int | None
    rank: int | None
    restarted: bool = True  # the ranks stopped; false: they rolled back and went on
    detection_s: float = 0.0
    recovery_s: float = 0.0  # includes waiting for nodes
    redone_s: float = 0.0

    @property
    def lost_s(self) -> float:
        return self.detection_s + self.recovery_s + self.redone_s


@dataclass
class Timeline:
    """Consecutive intervals in order."""

    ends: NDArray[np.float64]
    causes: NDArray[np.int64]
    owners: NDArray[np.int64]  # index of the interruption, -1: none
    begin: float
    interruptions: list[Interruption]

    @property
    def end(self) -> float:
        return float(self.ends[-1]) if self.ends.size else self.begin

    def lengths(self, since: float, until: float) -> NDArray[np.float64]:
        """Seconds of each piece between two times."""
        edges = np.clip(np.concatenate(([self.begin], self.ends)), since, until)
        return np.diff(edges)


@dataclass
class _Steps:
    """The steps of `StepLog` without those of abandoned generations, in order of time."""

    step: NDArray[np.int64]
    generation: NDArray[np.int64]
    end: NDArray[np.float64]
    seconds: NDArray[np.float64]
    validation: NDArray[np.float64]  # seconds after its end
    redone: NDArray[np.bool_]  # whether its result was discarded later
    by: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # the step that did so, -1

    @classmethod
    def of(cls, log: StepLog, resumed: Mapping[int, int]) -> _Steps:
        """`resumed`: generation -> step after which it continues."""
        step, generation = np.array(log.steps, np.int64), np.array(log.generations, np.int64)
        end, seconds, validation = np.array(log.times), np.array(log.seconds), np.array(log.validation)
        if step.size:
            # As `History`: ranks that were not stopped yet still record steps of an abandoned generation.
            good = np.isfinite(end) & np.isfinite(seconds) & (generation >= np.maximum.accumulate(generation))
            # A step is recorded again with its validation, if a later generation measured that.
            good[:-1] &= (np.diff(step) != 0) | (np.diff(end) != 0)
            step, generation, end, seconds, validation = (
                each[good] for each in (step, generation, end, seconds, validation)
            )
        n = step.size
        if not n:
            return cls(step, generation, end, seconds, validation, np.zeros(0, np.bool_))
        end, seconds = np.maximum.accumulate(end), np.maximum(seconds, 0.0)
        validation = np.maximum(np.nan_to_num(validation, posinf=0.0), 0.0)
        later = np.full(n, np.iinfo(np.int64).max)
        later[:-1] = np.minimum.accumulate(step[::-1])[::-1][1:]
        ahead = [after + 1 for g, after in resumed.items() if g > generation[-1]]
        redone = step >= np.minimum(later, min(ahead, default=np.iinfo(np.int64).max))
        by = np.full(n, -1)
        discarded = np.flatnonzero(redone)
        for at in np.flatnonzero(np.diff(step) <= 0) + 1:
            mine = discarded[: np.searchsorted(discarded, at)]
            mine = mine[(step[mine] >= step[at]) & (by[mine] < 0)]
            by[mine] = at
        return cls(step, generation, end, seconds, validation, redone, by)


class _Sweep:
    """Goes through events and generations in order; everything before `at` has its cause."""

    def __init__(self, events: Sequence[Event], steps: _Steps, queued_from: int | None) -> None:
        self.events, self.steps = events, steps
        self._queued_from = queued_from
        self._ends: list[NDArray[np.float64]] = []
        self._causes: list[NDArray[np.int64]] = []
        self._owners: list[NDArray[np.int64]] = []
        self.interruptions: list[Interruption] = []
        first = np.flatnonzero(np.diff(steps.generation, prepend=-1))
        edges = [*first.tolist(), steps.step.size]
        self._blocks = [*itertools.pairwise(edges)]
        self._date_late_records()
        known = [e for e in events if math.isfinite(e.time)]
        run_starts = [e.time for e in known if e.kind == "run_started"] or [e.time for e in known]
        starts = [float(steps.end[0] - steps.seconds[0])] if steps.step.size else []
        self._empty = not starts and not run_starts
        self.begin = self.at = min([*starts, *run_starts[:1]], default=0.0)
        self.phase, self.training, self.owner = START, False, -1
        self._around = START  # the phase in which the wait for nodes began
        self._ended: Event | None = None
        self._seen = self.at  # time of the last record
        self._started: set[int] = set()  # generations
        self._validation_s = 0.0  # after the last step of the last generation
        self._redone_by = -1  # that step, as in `_block`
        self._median: float | None = None  # seconds of a step
        self._slots = self._most_slots = 0
        self._elected = self._begun = False
        self._blamed_for: dict[int, int] = {}  # generation -> the interruption before it, -1
        self._last_owner = -1
        self._saves = np.array(sorted(_step(e) for e in events if e.kind in _SAVES), np.int64)
        self._saved_at = [e.time for e in events if e.kind in ("checkpoint_saved", "checkpoint_failed")]
        self._bad = sorted(
            (e for e in events if e.kind in ("step_skipped", *NUMERIC_FAULTS) and _rolls_back(e)),
            key=lambda e: e.time,
        )
        self._bad_owner: dict[int, int] = {}  # index in `_bad` -> interruption

    def _date_late_records(self) -> None:
        """A step that rank 0 did not live to record is recorded by the next generation: it ended before that began."""
        steps = self.steps
        generation_starts = {e.generation: e.time for e in self.events if e.kind == "generation_started"}
        for first, end in self._blocks:
            next_at = generation_starts.get(int(steps.generation[first]) + 1, math.inf)
            if end - first > 1 and steps.end[end - 1] > next_at:
                before = steps.end[end - 2] + steps.validation[end - 2]
                steps.end[end - 1] = min(next_at, before + steps.seconds[end - 1])

    def run(self, until: float | None) -> Timeline:
        """`until`: now, of a run that still runs."""
        for event in self.events:
            if not math.isfinite(event.time):
                continue
            if event.kind in _AFTER_STEPS or (
                event.kind == "waiting_for_nodes" and event.generation in self._started
            ):
                self._train(event.generation)
            elif event.kind in _BEFORE_STEPS:
                self._train(event.generation - 1)
            self._on_event(event)
            if event.kind not in _OPENING:
                self._seen = max(self._seen, event.time)
        self._train(None)
        self._finish(until)
        self._blame_redone()
        return Timeline(
            np.concatenate(self._ends) if self._ends else np.zeros(0),
            np.concatenate(self._causes) if self._causes else np.zeros(0, np.int64),
            np.concatenate(self._owners) if self._owners else np.zeros(0, np.int64),
            self.begin,
            self.interruptions,
        )

    def _to(self, time: float, cause: int | None = None) -> None:
        """Give the time up to `time` to `cause`, by default that of the phase."""
        if time > self.at:
            self._add([time], [self.phase if cause is None else cause], self.owner)
            self.at = time

    def _add(
        self,
        ends: Sequence[float] | NDArray[np.float64],
        causes: Sequence[int] | NDArray[np.int64],
        owner: int | NDArray[np.int64],
    ) -> None:
        self._ends.append(np.asarray(ends, np.float64))
        self._causes.append(np.asarray(causes, np.int64))
        self._owners.append(np.full(len(ends), owner, np.int64))

    def _validate(self, until: float) -> None:
        """The validation after the last step of a generation, of which `until` is known to be later."""
        if self.training:
            duration_s, self._validation_s = self._validation_s, 0.0
            self.owner = self._redone_by
            self._to(min(until, self.at + duration_s), VALIDATION if self._redone_by == -1 else REDONE)
            self.owner = -1

    # -- events

    def _on_event(self, event: Event) -> None:
        match event.kind:
            case "run_started":
                self._start(event)
            case "coordinator_elected":
                if not self._elected and self.phase == QUEUE:
                    self._to(event.time)
                    self.phase = START
                self._elected = True
            case "generation_started":
                self._validate(event.time)
                self._generation(event)
            case "waiting_for_nodes":
                if self.training:  # a node left, and the others wait for another
                    self.training, self.phase = False, RESHAPE
                if self.phase != WAITING:
                    self._to(event.time - WAIT_REPORTED_S)
                    self._around, self.phase = self.phase, WAITING
            case "recovering" | "gave_up":
                self._validate(event.time)
                self._fail(event)
                self.phase = RECOVERY if event.kind == "recovering" else ENDING
            case kind if kind in ENDS:
                self._validate(event.time)
                self._end(event)

    def _start(self, event: Event) -> None:
        how = (event.data or {}).get("scheduled")
        self._close_start()
        if self._begun:
            preempted = self._ended is not None and (self._ended.data or {}).get("preempted") is True
            gap = QUEUE if preempted and how == "continued" else STOPPED
            self._to(event.time, UNKNOWN if self._ended is None else gap)
        self._begun, self._ended, self.training, self._elected = True, None, False, False
        queued = how == "submitted" or (how is None and event.generation == self._queued_from)
        self.phase, self.owner = QUEUE if queued else START, -1

    def _close_start(self) -> None:
        """A start without a recorded end: unknown after its last record."""
        if self._ended is None:
            self._validate(self._seen)
            self._to(self._seen, UNKNOWN if self.training else None)

    def _generation(self, event: Event) -> None:
        if self.training:
            self.training, self.phase = False, RESHAPE
        self._to(event.time)
        if self.phase == WAITING:
            self.phase = self._around
        self._started.add(event.generation)
        slots = (event.data or {}).get("slots")
        if isinstance(slots, dict):
            self._slots = len(slots)
            self._most_slots = max(self._most_slots, self._slots)

    def _fail(self, event: Event) -> None:
        """A failure was detected: the step that it interrupted may have taken as long as others, the rest is detection."""
        data = event.data or {}
        if event.kind != "recovering" and not self.training and self.owner >= 0:
            return  # already known
        known = data.get("class")
        failure = Interruption(
            event.time,
            event.generation,
            known if isinstance(known, str) else "unknown",
            data["signal"] if isinstance(data.get("signal"), str) else None,
            str(data.get("cause") or event.message),
            event.node,
            event.rank,
        )
        if not self.training:  # a further failure during a recovery, or during the start
            self._to(event.time)
        self.owner = len(self.interruptions)
        if self._last_owner < 0:  # the first of several is what threw steps away
            self._last_owner = self.owner
        self.interruptions.append(failure)
        if self.training:
            self._to(min(event.time, self.at + (self._median or 0.0)), REDONE)
            self._to(event.time, DETECTION)
        self.training = False

    def _end(self, event: Event) -> None:
        if event.kind == "run_failed":
            self._fail(event)
        elif self.training:
            saved = [time for time in self._saved_at if self.at < time <= event.time]
            self._to(max(saved, default=self.at), CHECKPOINT)
            self.training, self.phase = False, ENDING
        self._to(event.time)
        self._ended, self.training, self.phase, self.owner = event, False, STOPPED, -1
        if event.kind != "run_failed":
            self._last_owner = -1

    def _finish(self, until: float | None) -> None:
        if self._empty:
            return
        if until is not None:
            self._validate(until)
        if until is None:
            self._close_start()
        elif self.training:
            self._to(min(until, self.at + _OVERDUE * (self._median or math.inf)), PRODUCTIVE)
            self._to(until, UNKNOWN)
        else:
            self._to(until)

    # -- steps

    def _train(self, generation: int | None) -> None:
        """The steps of generations up to this one."""
        while self._blocks and (
            generation is None or self.steps.generation[self._blocks[0][0]] <= generation
        ):
            self._block(*self._blocks.pop(0))

    def _block(self, first: int, end: int) -> None:
        steps = self.steps
        seconds, ends = steps.seconds[first:end], np.maximum(steps.end[first:end], self.at)
        if self._ended is not None or self.training:  # this generation has no events
            self.training, self.phase = False, UNKNOWN
        self._ended = None
        if end - first > 1:
            self._median = median(seconds[1:])
        self._to(float(ends[0] - seconds[0]))
        extra = max(0.0, float(ends[0]) - self.at - (self._median or math.inf))
        self._to(self.at + extra, WARM_UP if self.phase == START else None)
        self._blamed_for[int(steps.generation[first])] = self._last_owner
        before = np.concatenate(([self.at], ends[:-1]))
        gap = np.maximum(ends - before - seconds, 0.0)
        gap[0] = 0.0
        validated = np.minimum(gap, np.concatenate(([0.0], steps.validation[first : end - 1])))
        previous_redone = np.concatenate(([False], steps.redone[first : end - 1]))
        gap -= validated
        why, owner = self._gaps(first, end, before, ends, gap)
        gap[why < 0] = 0.0
        gap += validated
        # Until it is known what made them be done again: the step that did so, below -1.
        by = np.where(steps.redone[first:end], -3 - steps.by[first:end], -1)
        work = np.where(steps.redone[first:end], REDONE, PRODUCTIVE)
        # Per step: (end, cause, owner) of the validation of the previous step, the gap to it, the step, and its loss from
        # fewer nodes. A part that no step of the block has, which is usual, is left out.
        parts = []
        if validated.any():
            of_validation = np.where(previous_redone, REDONE, VALIDATION)
            parts.append((before + validated, of_validation, np.where(previous_redone, np.roll(by, 1), -1)))
        if gap.any():
            parts.append((before + gap, np.maximum(why, 0), owner))
        full = self._slots / self._most_slots if self._most_slots else 1.0
        parts.append((ends - (1 - full) * (ends - before - gap), work, by))
        if full < 1:
            parts.append((ends, np.where(work == REDONE, REDONE, SHRUNK), by))
        table, causes, owners = (np.stack(each, axis=1) for each in zip(*parts, strict=True))
        used = np.diff(table, axis=1, prepend=before[:, None]) > 0
        self._add(table[used], causes[used], owners[used])
        self.at = float(ends[-1])
        self._validation_s, self._redone_by = float(steps.validation[end - 1]), int(by[-1])
        self.training, self.owner, self._last_owner, self._begun = True, -1, -1, True
        self._seen = max(self._seen, self.at + self._validation_s)  # a step is recorded after its validation

    def _gaps(
        self,
        first: int,
        end: int,
        before: NDArray[np.float64],
        ends: NDArray[np.float64],
        gap: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(cause of the time between each step and the one before, -1 for none; its interruption)."""
        why, owner = np.full(end - first, -1), np.full(end - first, -1)
        if end - first < 2:
            return why, owner
        after = np.concatenate(([-1], self.steps.step[first : end - 1]))  # a save comes after this step
        known = np.zeros(end - first, np.bool_)
        if self._saves.size:
            found = np.minimum(np.searchsorted(self._saves, after), self._saves.size - 1)
            known = self._saves[found] == after
        large = gap > max(_JITTER_S, _JITTER * (self._median or 0.0))
        why[large] = UNKNOWN
        # The latest save may still be in progress; one that its generation did not complete has no event.
        tail = np.where(large & (after > after[known].max(initial=-1)) & (gap < _UNFINISHED_SAVE_S), gap, 0.0)
        if tail.any():
            why[tail.argmax()] = CHECKPOINT
        why[(gap > 0) & known] = CHECKPOINT
        times = [e.time for e in self._bad]
        low, high = np.searchsorted(times, before, "right"), np.searchsorted(times, ends, "right")
        for i in np.flatnonzero((high > low) & (gap > 0)):
            why[i], owner[i] = REDONE, self._bad_step(int(low[i]))
        return why, owner

    def _bad_step(self, index: int) -> int:
        """The interruption of an event about wrong numbers."""
        if index not in self._bad_owner:
            event, data = self._bad[index], self._bad[index].data or {}
            self._bad_owner[index] = len(self.interruptions)
            cls = data.get("class")
            found = Interruption(
                event.time,
                event.generation,
                cls if isinstance(cls, str) else "numerics",
                event.kind,
                event.message,
                event.node,
                event.rank,
                restarted=False,
            )
            self.interruptions.append(found)
        return self._bad_owner[index]

    def _blame_redone(self) -> None:
        """Replace the step that made others be done again by what made it so."""
        steps = self.steps
        for owners in self._owners:
            for by in np.unique(owners[owners < -1]):
                at = -3 - int(by)  # -1: no step yet
                blamed = self._last_owner
                if at >= 0:
                    blamed = self._blamed_for.get(int(steps.generation[at]), -1)
                    if at and steps.generation[at] == steps.generation[at - 1]:  # rolled back
                        times = [e.time for e in self._bad]
                        found = int(np.searchsorted(times, steps.end[at], "right")) - 1
                        blamed = self._bad_step(found) if found >= 0 else -1
                owners[owners == by] = blamed


def median(values: Sequence[float] | NDArray[np.float64]) -> float:
    """As `np.median`, which first imports `numpy.ma`: 15 ms. NaN if one value is."""
    n = len(values)
    ordered = np.partition(values, [(n - 1) // 2, n // 2, n - 1])
    return math.nan if math.isnan(ordered[-1]) else float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def timeline(
    events: Sequence[Event], log: StepLog, until: float | None, queued_from: int | None = None
) -> Timeline:
    """The timeline of a run. `until`: now, if it runs; `queued_from`: the first generation of a start that a scheduler
    got, for events of versions that do not record it."""
    resumed = {
        e.generation: _step(e)
        for e in events
        if e.kind == "recovered" and isinstance((e.data or {}).get("step"), int)
    }
    found = _Sweep(events, _Steps.of(log, resumed), queued_from).run(until)
    lengths, n = found.lengths(-math.inf, math.inf), len(found.interruptions)
    sums = np.bincount(
        (found.owners + 1) * len(_OF_FAILURE) + np.array(_OF_FAILURE)[found.causes],
        lengths,
        (n + 1) * len(_OF_FAILURE),
    ).reshape(n + 1, -1)
    for failure, (_, detection, recovery, redone) in zip(
        found.interruptions, sums[1:, :4].tolist(), strict=True
    ):
        failure.detection_s, failure.recovery_s, failure.redone_s = detection, recovery, redone
    return found


def _step(event: Event) -> int:
    value = (event.data or {}).get("step")
    return value if type(value) is int else -1


def _rolls_back(event: Event) -> bool:
    evidence = (event.data or {}).get("evidence")
    return event.kind == "step_skipped" or (
        isinstance(evidence, dict) and evidence.get("action") in ("redo", "roll back", "skip")
    )
