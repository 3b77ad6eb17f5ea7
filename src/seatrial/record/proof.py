"""The proof that every sample was seen exactly once, in order: from the ledger, line by line, and other records.

Each step has its own samples, `BatchSizes.samples`, whatever the layout. So a history is valid if
each generation resumed from a state that an earlier one had reached, did its steps consecutively, and gave each step
its own samples. What a generation did after the state that the next one resumed from is not part of the history: it was
redone. Three records are written independently of the ledger and must agree with it: metrics.jsonl (which steps each
generation trained), the `resumed` and `recovered` events (the state it resumed from), and the `step_skipped` events
(what was skipped on purpose). A lost ledger line contradicts one of them even if another generation did the step too.

Pure: no file is read here, see `record.audit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from seatrial.base.batches import BatchSizes
from seatrial.record.ledger import LedgerRecord, missing_steps

ProofStatus = Literal["proven", "violated", "unjudged", "empty"]

LEDGER = "ledger.jsonl"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Evidence:
    """Facts about the run from other records."""

    # Every generation that began -> step of the state it resumed from, 0: from scratch. Empty: not known.
    starts: Mapping[int, int] = field(default_factory=dict)
    # generation -> the steps that it trained, in file order
    trained: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # (generation, step): reported as skipped on purpose
    skipped: frozenset[tuple[int, int]] = frozenset()
    # the last step of the job, if the run reports that it has finished
    finished: int | None = None
    # Whether every line could be read. If not, an absent record proves nothing.
    events_whole: bool = True
    metrics_whole: bool = True
    # The run keeps writing while it is read; the evidence was then read before the ledger.
    live: bool = False


@dataclass(frozen=True)
class Violation:
    """One contradiction; `line` is the ledger's, None if the line in question is missing."""

    message: str
    step: int | None = None
    generation: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"{LEDGER}:{self.line}: {self.message}"


@dataclass
class Stretch:
    """The steps `first`, ..., `last` of one generation, from the state that generation `parent` had left."""

    generation: int
    first: int
    last: int
    parent: int | None  # None: from scratch, or from an unknown state (which is a violation)
    ending: int = 0  # the step of its last line
    trained: set[int] = field(default_factory=set)
    skipped: dict[int, int] = field(default_factory=dict)  # step -> first line that records it
    missing: list[range] = field(default_factory=list)

    def covers(self, step: int) -> bool:
        """Whether `step` is within this stretch."""
        return self.first <= step <= self.last

    def lacks(self, step: int) -> bool:
        """Whether `step` is missing from it."""
        return any(step in gap for gap in self.missing)


@dataclass(frozen=True)
class Proof:
    """The result of checking the ledger; `violations` is empty if it is proven."""

    steps: int  # the history ends with this step
    skipped: list[
        int
    ]  # steps of the history that were skipped on purpose: their samples were not used for training
    redone: int  # steps that were done but are not part of the history: another generation redid them
    batches: BatchSizes | None  # None: unknown
    stretches: list[Stretch]  # by generation
    violations: list[Violation]

    @property
    def trained_samples(self) -> int:
        """Samples that the state at the end has seen, each once."""
        if self.batches is None:
            return 0
        return self.batches.total(self.steps) - sum(map(self.batches.size, self.skipped))

    @property
    def verdict(self) -> ProofStatus:
        if self.violations:
            return "violated"
        if not self.stretches:
            return "empty"
        return "proven" if self.batches else "unjudged"

    def disagreement(self, step: int, next_sample: int, generation: int) -> str | None:
        """How a checkpoint's own progress contradicts the ledger, as a message; None if it does not."""
        if self.batches and next_sample != (end := self.batches.total(step)):
            return f"it continues at sample {next_sample}, but step {step} ends before sample {end}"
        if not any(s.covers(step) and s.generation <= generation for s in self.stretches):
            return f"the ledger has no step {step} of generation {generation} or before"
        return None


def prove(
    lines: Iterable[tuple[int, LedgerRecord]], batches: BatchSizes | None, evidence: Evidence | None = None
) -> Proof:
    """Judge the ledger's records, given with their line numbers in file order."""
    judge = _Judge(batches, evidence or Evidence())
    for number, record in lines:
        judge.add(number, record)
    judge.compare()
    return judge.result()


class _Judge:
    """Processes the ledger in write order, and collects violations."""

    def __init__(self, batches: BatchSizes | None, evidence: Evidence) -> None:
        self._batches = batches
        self._evidence = evidence
        self._stretches: dict[int, Stretch] = {}
        self._violations: list[Violation] = []

    # -- one line

    def add(self, number: int, record: LedgerRecord) -> None:
        """Process one record, at line `number`."""
        if record.step < 1 or record.generation < 1:
            what = f"step {record.step} of generation {record.generation} does not exist: both count from 1"
            self._object(what, record, number)
            return
        stretch = self._stretches.get(record.generation)
        right = self._check_samples(number, record)
        if stretch is None:
            stretch = self._stretches[record.generation] = self._begin(number, record)
        elif right or record.step <= stretch.last + 1:
            self._continue(stretch, number, record)
        else:
            # The step number is damaged: accepting it would invalidate every line after it.
            record = replace(record, step=stretch.last + 1)
            stretch.last += 1
        stretch.ending = record.step
        if record.skipped:
            stretch.skipped.setdefault(record.step, number)
        else:
            stretch.trained.add(record.step)

    def _check_samples(self, number: int, record: LedgerRecord) -> bool:
        """Whether the record has the samples of its step."""
        if self._batches is None:
            return True
        first, end = self._batches.samples(record.step)
        if (record.first_sample, record.end_sample) == (first, end):
            return True
        found = f"{record.first_sample} to {record.end_sample - 1}"
        message = f"step {record.step} has the samples {found} instead of {first} to {end - 1}"
        self._object(message, record, number)
        return False

    def _begin(self, number: int, record: LedgerRecord) -> Stretch:
        """The first line of a generation: the state before it must have been reached by an earlier one."""
        parent = self._reached(record.step - 1, record.generation)
        starts = self._evidence.starts
        start = starts.get(record.generation)
        # If the run is live, the newest generation may have begun after the events were read.
        if starts and start is None and not (self._evidence.live and record.generation > max(starts)):
            message = f"generation {record.generation} was never begun according to {EVENTS}"
            self._object(message, record, number)
        if record.step > 1 and parent is None:
            before = [s.last for s in self._stretches.values() if s.generation < record.generation]
            from_step = min(max(before, default=0) + 1, record.step - 1)
            message = (
                f"{missing_steps(from_step, record.step - 1)}: generation {record.generation} begins with "
                f"step {record.step}, and none before it had reached step {record.step - 1}"
            )
            self._object(message, record, number)
        elif start is not None and record.step > start + 1:
            # An earlier step is no contradiction: it may have rolled back before it finished a step.
            message = (
                f"{missing_steps(start + 1, record.step - 1)} in generation {record.generation}: it resumed "
                f"after step {start} according to {EVENTS}, and begins with step {record.step}"
            )
            self._object(message, record, number)
        return Stretch(record.generation, record.step, record.step, parent)

    def _continue(self, stretch: Stretch, number: int, record: LedgerRecord) -> None:
        step = record.step
        if step == stretch.last + 1:
            stretch.last = step
        elif step > stretch.last:
            message = f"{missing_steps(stretch.last + 1, step - 1)} in generation {stretch.generation}"
            stretch.missing.append(range(stretch.last + 1, step))
            stretch.last = step
            self._object(message, record, number)
        elif record.skipped:
            # Trained, rolled back, and then skipped; or skipped again after a rollback.
            if step < stretch.first and self._reached(step, stretch.generation) is None:
                self._object(f"step {step} is skipped before it was reached", record, number)
        elif stretch.lacks(step) and step not in stretch.trained:
            self._object(f"step {step} of generation {stretch.generation} is out of order", record, number)
        elif step < stretch.first:
            what = f"step {step} of generation {stretch.generation} is out of order: it began with step {stretch.first}"
            self._object(what, record, number)
        else:
            what = f"step {step} was done twice in generation {stretch.generation}"
            self._object(what, record, number)

    def _reached(self, step: int, before: int) -> int | None:
        """The latest generation earlier than `before` that has done `step`, among the lines read so far."""
        found = [g for g, s in self._stretches.items() if g < before and s.covers(step)]
        return max(found, default=None)

    # -- the whole ledger

    def compare(self) -> None:
        """Compare the ledger with the other records."""
        self._compare_metrics()
        self._compare_events()
        finished = self._evidence.finished
        end = self._stretches[max(self._stretches)].last if self._stretches else 0
        if finished is not None and end < finished:
            message = f"according to {EVENTS} the run finished with step {finished}, but the ledger ends with step {end}"
            self._violations.append(Violation(message, finished))

    def _compare_metrics(self) -> None:
        for generation, trained_steps in sorted(self._evidence.trained.items()):
            if not trained_steps:
                continue
            stretch, newest = self._stretches.get(generation), max(trained_steps)
            if stretch is None or stretch.last < newest:
                after = 0 if stretch is None else stretch.last
                self._lost(f"{METRICS} has step {newest}", newest, generation, after)
            if stretch is None:
                continue
            # A generation that rolled back to before its first step has done steps that the ledger already has, but
            # not as its first ones.
            if self._evidence.metrics_whole and trained_steps[0] < stretch.first:
                message = f"{METRICS} begins with step {trained_steps[0]} in generation {generation}, the ledger with {stretch.first}"
                self._violations.append(Violation(message, trained_steps[0], generation))
            steps = set(trained_steps)
            for step in sorted(steps - stretch.trained):
                if stretch.covers(step) and not stretch.lacks(step):
                    message = (
                        f"step {step} of generation {generation} was skipped, but {METRICS} has it as trained"
                    )
                    line = stretch.skipped.get(step)
                    self._violations.append(Violation(message, step, generation, line))
            if self._evidence.metrics_whole:
                for step in sorted(stretch.trained - steps):
                    # The last step may be missing because the rank that writes the metrics died.
                    if step < newest:
                        message = (
                            f"step {step} of generation {generation} is in the ledger, but not in {METRICS}"
                        )
                        self._violations.append(Violation(message, step, generation))

    def _lost(self, who: str, step: int, generation: int, after: int) -> None:
        known = f"ends with step {after}" if after else "does not contain it"
        self._violations.append(
            Violation(f"{who} of generation {generation}, the ledger {known}", step, generation)
        )

    def _compare_events(self) -> None:
        for generation, step in sorted(self._evidence.skipped):
            stretch = self._stretches.get(generation)
            if stretch is None or step not in stretch.skipped:
                message = f"step {step} was skipped in generation {generation}, according to {EVENTS}, but not in the ledger"
                self._violations.append(Violation(message, step, generation))
        if not self._evidence.events_whole:
            return
        seen = {step for _, step in self._evidence.skipped}
        newest = max(self._stretches, default=0)
        for generation in sorted(self._stretches):
            stretch = self._stretches[generation]
            for step, line in sorted(stretch.skipped.items()):
                # The event is written after the line, so a rank's last line may have none.
                if step == stretch.ending or (self._evidence.live and generation == newest):
                    seen.add(step)
                if step not in seen:
                    message = f"step {step} is skipped, and {EVENTS} has no reason for it"
                    self._violations.append(Violation(message, step, generation, line))

    def result(self) -> Proof:
        """The resulting proof."""
        lineage = self._lineage()
        skipped: set[int] = set()
        for generation, first, last in lineage:
            # A later generation may have rolled back to before its own start, and skipped a step of an earlier one.
            later = [s for s in lineage if s[0] >= generation]
            for other, _, _ in later:
                skipped |= {step for step in self._stretches[other].skipped if first <= step <= last}
        done = sum(s.last - s.first + 1 for s in self._stretches.values())
        counted = sum(last - first + 1 for _, first, last in lineage)
        return Proof(
            steps=lineage[0][2] if lineage else 0,
            skipped=sorted(skipped),
            redone=done - counted,
            batches=self._batches,
            stretches=[self._stretches[g] for g in sorted(self._stretches)],
            violations=self._violations,
        )

    def _lineage(self) -> list[tuple[int, int, int]]:
        """(generation, first, last step) of the stretches that led to the final state, newest first."""
        found: list[tuple[int, int, int]] = []
        generation, last = max(self._stretches, default=None), 0
        while generation is not None:
            stretch = self._stretches[generation]
            found.append((generation, stretch.first, last or stretch.last))
            generation, last = stretch.parent, stretch.first - 1
        return found

    def _object(self, message: str, record: LedgerRecord, line: int) -> None:
        self._violations.append(Violation(message, record.step, record.generation, line))
