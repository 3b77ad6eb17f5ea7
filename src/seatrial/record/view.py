"""A run's combined records as a view; works while it runs, after it died, and if it never started."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from seatrial.base.batches import BatchSizes
from seatrial.base.files import parse_json, parse_toml, read_text
from seatrial.record import events, ledger, metrics
from seatrial.record.events import Event
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.history import History, LedgerSummary, Pace
from seatrial.record.jsonl import Problem, Tail
from seatrial.record.ledger import LedgerRecord, ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord
from seatrial.record.recent import recent_ledger
from seatrial.record.running import Running, running
from seatrial.record.saved import CheckpointInfo, read_checkpoints
from seatrial.record.states import KINDS, Facts, State, diverged, is_failure, state_of
from seatrial.record.step_log import StepLog
from seatrial.record.typed import decode, decode_all

Record = TypeVar("Record")

# Written when a run's folder is opened, whether or not anything is started afterwards.
_OF_OPENING = ("job_changed", "layout_chosen")
# One per rank and generation; no view shows them.
_NOT_KEPT = "rank_started"
_UNWANTED = b'"kind":"rank_started"'

# What a brief view reads of metrics and events: the end, and every event that decides the state or is an alert.
_BRIEF_BYTES = 32 << 10
_BRIEF_EVENTS = (*KINDS, "generation_started", "alert")
_BRIEF_LEDGER = 64  # records


@dataclass(frozen=True)
class JobFacts:
    """The few values of job.toml that a view needs; None if the file does not contain them."""

    steps: int | None = None
    batches: BatchSizes | None = None
    sequence_length: int | None = None
    checkpoint_steps: int | None = None  # also None where the run chooses the interval


@dataclass
class RunView:
    """A run according to its folder at one moment."""

    folder: RunFolder
    state: State
    state_reason: str
    pid: int | None  # of the process that runs it
    generation: int  # 0: never started
    first_generation: int  # of the last start; each recovery is a further one
    job: JobFacts
    device: str | None  # of rank 0: "cpu" or the GPU name of the driver; None: unknown
    history: History
    log: StepLog  # also of steps that were done again; of a brief view only recent ones
    eta_s: float | None  # seconds to the job's last step; None: not known, or not yet
    events: list[Event]  # without `rank_started`
    checkpoints: list[CheckpointInfo]  # complete ones, by step
    latest: CheckpointInfo | None
    failure: Failure | None
    ledger_steps: int
    ledger_gaps: list[str]
    skipped_steps: list[int] = field(default_factory=list)  # on purpose: no update was made
    problems: list[Problem] = field(default_factory=list)

    @property
    def first(self) -> MetricsRecord | None:
        return self.history.first

    @property
    def last(self) -> MetricsRecord | None:
        """The last trained step."""
        return self.history.last

    @property
    def step(self) -> int:
        """The last step that was trained or skipped; 0 before the first."""
        step = self.last.step if self.last is not None else 0
        left_out = set(self.skipped_steps)
        while step + 1 in left_out:
            step += 1
        return step

    @property
    def skipped_samples(self) -> int:
        """The number of samples skipped on purpose."""
        return 0 if self.job.batches is None else sum(map(self.job.batches.size, self.skipped_steps))

    @property
    def tokens(self) -> int:
        """Tokens trained on. metrics.jsonl counts those of all steps up to the last one, including skipped ones."""
        if self.last is None:
            return 0
        if self.job.batches is None:
            return self.last.tokens
        left_out = sum(self.job.batches.size(step) for step in self.skipped_steps if step < self.last.step)
        return self.last.tokens - left_out * (self.job.sequence_length or 0)

    @property
    def own_events(self) -> list[Event]:
        """The events of the last start."""
        return [e for e in self.events if e.generation >= self.first_generation]

    @property
    def diverged(self) -> Event | None:
        """The event that ended the last start, if it diverged."""
        return diverged(self.own_events) if self.state == "failed" else None

    @property
    def sample(self) -> dict[str, Any] | None:
        """{"prompt", "text"} of the last text that the trained model generated."""
        for event in reversed(self.events):
            if event.kind == "sample" and event.data is not None:
                return event.data
        return None

    def wall_time_s(self, now: float) -> float | None:
        """Seconds from the last start to its last record, or to `now` while it runs."""
        times = [e.time for e in self.own_events]
        stepped = self.history.column("time", self.first_generation)
        times += [stepped[0], stepped[-1]] if stepped else []
        if not times:
            return None
        return (now if self.state == "running" else max(times)) - min(times)


class RunReader:
    """Follows a run folder: each `poll` reads only what was written since the previous one."""

    def __init__(
        self,
        folder: RunFolder,
        show: Callable[[MetricsRecord | Event], None] | None = None,
        *,
        brief: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        """`show` is called with each step and event. `brief`: see `read_brief`; `also`: kinds of events kept then."""
        self.folder = folder
        self.show = show
        self.brief = brief
        self._always = re.compile(f'"kind":"(?:{"|".join((*_BRIEF_EVENTS, *also))})"'.encode())
        self._begin()

    def _begin(self) -> None:
        folder = self.folder
        self.device: str | None = None
        self.history, self.log = History(), StepLog()
        self._learn_batches()
        self.events: list[Event] = []
        self.problems: list[Problem] = []  # unreadable lines
        self._started: dict[str, set[int]] = {"run_started": set(), "generation_started": set()}
        self._newest = 0  # newest generation with any activity
        self._judged: tuple[int, list[int], list[str]] | None = None  # result for an irregular ledger
        recent = _BRIEF_BYTES if self.brief else None
        self._metrics = Tail(folder.metrics, metrics.NOUN, recent_bytes=recent)
        self._events = Tail(
            folder.events, events.NOUN, recent_bytes=recent, always=self._always, unwanted=_UNWANTED
        )
        self._ledger = Tail(folder.ledger, ledger.NOUN)

    def _learn_batches(self) -> None:
        """Read them from the job file, before any step; None: there is none yet, or it is damaged."""
        self._batches = read_job_facts(self.folder)[0].batches
        self.pace, self.ledger_summary = Pace(self._batches or BatchSizes.of(1)), LedgerSummary(self._batches)

    def poll(self, *, over: bool = False) -> None:
        """Read new records. `over`: there is no writer any more, so an unterminated last line counts.

        If a file was replaced, everything is read again.
        """
        if self._batches is None and not self.history.steps:
            self._learn_batches()
        # Events first: `device` precedes the first step and is needed to show it.
        self._read_records(self._events, Event, self._add_event, over)
        self._read_records(self._metrics, MetricsRecord, self._add_metrics, over, self._add_metrics_data)
        if not self.brief:
            self._read_records(
                self._ledger, LedgerRecord, self.ledger_summary.add, over, self._add_ledger_data
            )
        if any(tail.opened > 1 for tail in (self._metrics, self._events, self._ledger)):
            show, self.show = self.show, None
            self._begin()
            self.poll(over=over)
            self.show = show

    def eta_s(self, total: int | None) -> float | None:
        """Seconds from the last step to step `total`; None: not known, or not yet. The same in every view."""
        last = self.history.last
        if last is None or total is None:
            return None
        return self.pace.eta_s(last.step, total, self.start)

    @property
    def start(self) -> int:
        """The first generation of the last start."""
        return self._first_generation(self._newest)

    def view(self, *, own: bool = False) -> RunView:
        """The current content of the folder. Damaged files become `problems`, never exceptions.

        `own`: this process holds the run's lock, and the start is over.
        """
        folder = self.folder
        # Check the lock first: a run that ends while its files are read is then shown as running, not as stopped.
        by = None if own else running(folder)
        held = by is not None
        self.poll(over=not held)
        facts, wrong_job = read_job_facts(folder)
        checkpoints, latest = read_checkpoints(folder, self.events)
        complete = bool(checkpoints) and facts.steps is not None and checkpoints[-1].step >= facts.steps
        opened, generation = folder.last_generation(), self._newest
        first = self._first_generation(generation)
        start = self._facts(by, first, generation, complete)
        if (held and start.end is not None and opened > generation) or not generation:
            # A start without records yet. One that found all steps done, or was refused, never has any.
            first = generation = opened
            start = self._facts(by, first, generation, complete)
        elif held:
            generation = max(opened, generation)
        state, reason = state_of(start)
        steps, skipped, gaps = self._judge_ledger(facts.batches, again=not held)
        last = self.history.last
        # While the run is active, the ledger may be a step behind the metrics.
        if not held and not self.brief and last is not None and last.step > steps:
            gaps.append(f"step {last.step} of metrics.jsonl is not in the ledger")
        return RunView(
            folder=folder,
            state=state,
            state_reason=reason,
            pid=by.pid if by is not None and state == "running" else None,
            generation=generation,
            first_generation=first,
            job=facts,
            device=self.device,
            history=self.history,
            log=self.log,
            eta_s=self.eta_s(facts.steps),
            events=self.events,
            checkpoints=checkpoints,
            latest=latest,
            failure=find_failure(folder, list(start.events), generation) if state == "failed" else None,
            ledger_steps=steps,
            ledger_gaps=gaps,
            skipped_steps=skipped,
            problems=self.problems + wrong_job,
        )

    def _read_records(
        self,
        tail: Tail,
        cls: type[Record],
        take: Callable[[Record], None],
        over: bool,
        bulk: Callable[[bytearray], int] | None = None,
    ) -> None:
        def all_of(numbered: list[tuple[int, dict[str, Any]]]) -> None:
            records, wrong = decode_all(cls, numbered, file=tail.path.name, noun=tail.noun)
            self.problems += [*tail.problems, *wrong]
            tail.problems.clear()
            for record in records:
                take(record)

        for part in tail.parts(bulk if self.show is None else None):
            all_of(part)
        all_of(tail.rest() if over else [])

    def _add_metrics_data(self, data: bytearray) -> int:
        from seatrial.record import bulk

        found = bulk.columns(MetricsRecord, data, self.folder.columns)
        if found is None:
            return 0
        lines = len(found["step"])

        def record(place: int) -> MetricsRecord:
            # Mostly the first and the last: all lines of some MiB are as many objects as records.
            if place == lines - 1:
                line = data[data.rfind(b"\n", 0, -1) + 1 :]
            else:
                line = data.split(b"\n", place + 1)[place]
            return decode(MetricsRecord, parse_json(line.decode()))

        self.history.add_columns(found, record)
        self.log.add_columns(found)
        self.pace.add_columns(found)
        self._newest = max(self._newest, int(found["generation"].max()))
        return lines

    def _add_ledger_data(self, data: bytearray) -> int:
        from seatrial.record import bulk

        found = bulk.columns(LedgerRecord, data, self.folder.columns)
        if found is None:
            return 0
        self.ledger_summary.add_columns(found)
        return len(found["step"])

    def _add_metrics(self, record: MetricsRecord) -> None:
        self.history.add(record)
        self.log.add(record)
        self.pace.add(record.generation, record.step, record.step_time_s)
        self._newest = max(self._newest, record.generation)
        if self.show is not None:
            self.show(record)

    def _add_event(self, event: Event) -> None:
        if event.kind in self._started:
            self._started[event.kind].add(event.generation)
        if event.kind not in _OF_OPENING:
            self._newest = max(self._newest, event.generation)
        if event.kind == "device":
            self.device = _text((event.data or {}).get("device"))
        if event.kind != _NOT_KEPT:
            self.events.append(event)
            if self.show is not None:
                self.show(event)

    def _first_generation(self, generation: int) -> int:
        """The first generation of the start that `generation` belongs to.

        A recovery is a generation started by the coordinator within a start. Any other generation is a start of its
        own, even without records.
        """
        recoveries = self._started["generation_started"] - self._started["run_started"]
        while generation in recoveries and generation > 1:
            generation -= 1
        return generation

    def _facts(self, by: Running | None, first: int, generation: int, complete: bool) -> Facts:
        return Facts(
            by=by,
            events=[e for e in self.events if e.generation >= first],
            generation=generation,
            stepped=bool(self.history.column("time", first)),
            ever_stepped=bool(self.history.steps),
            complete=complete,
        )

    def _judge_ledger(self, batches: BatchSizes | None, again: bool) -> tuple[int, list[int], list[str]]:
        """(steps, skipped steps, contradictions). `again`: judge the current ledger, even if that is slow."""
        ledger_summary = self.ledger_summary
        if self.brief:
            left_out, generation = set[int](), 0
            for record in recent_ledger(self.folder, _BRIEF_LEDGER):
                if record.generation > generation:  # the new generation resumed before this step
                    left_out = {step for step in left_out if step < record.step}
                generation = max(generation, record.generation)
                if record.generation == generation:
                    (left_out.add if record.skipped else left_out.discard)(record.step)
            return 0, sorted(left_out), []
        if not ledger_summary.odd and (batches is None or ledger_summary.batches in (None, batches)):
            return ledger_summary.steps, sorted(ledger_summary.skipped), []
        if self._judged is None or again:
            records, _ = read_ledger(self.folder)
            gaps = ledger_gaps(records, batches) if batches else []
            self._judged = len(records), [r.step for r in records if r.skipped], gaps
        steps, skipped, gaps = self._judged
        return (
            max(steps, ledger_summary.steps),
            sorted({*skipped, *ledger_summary.skipped} if not again else skipped),
            list(gaps),
        )


def read_view(folder: RunFolder) -> RunView:
    """The complete view of the folder. Damaged files become `problems`, never exceptions."""
    return RunReader(folder).view()


def read_brief(folder: RunFolder) -> RunView:
    """As `read_view`, from the end of the records: a few milliseconds however long they are.

    State, step, the last loss and speed are the same. History, skipped steps, events and thus checkpoints in other
    places are recent ones only, the ledger is not judged, and damage further back goes unnoticed.
    """
    return RunReader(folder, brief=True).view()


def read_job_facts(folder: RunFolder) -> tuple[JobFacts, list[Problem]]:
    """Read them from job.toml, without validation: a run of another version must still be visible."""
    try:
        job = parse_toml(read_text(folder.job_toml))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return JobFacts(), [Problem(folder.job_toml.name, 0, f"cannot be used ({reason})")]

    def whole(section: str, key: str) -> int | None:
        values = job.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return value if type(value) is int and value > 0 else None

    return JobFacts(
        whole("train", "steps"),
        _batches(job.get("train")),
        whole("train", "sequence_length"),
        whole("checkpoint", "every_steps"),
    ), []


def _batches(train: Any) -> BatchSizes | None:
    try:
        ramp = [(phase["steps"], phase["global_batch"]) for phase in train.get("batch_ramp", [])]
        numbers = [train["global_batch"], *chain(*ramp)]
    except (AttributeError, KeyError, TypeError):
        return None
    usable = all(type(number) is int and number > 0 for number in numbers)
    return BatchSizes.of(train["global_batch"], ramp) if usable else None


def find_failure(folder: RunFolder, events: list[Event], generation: int) -> Failure | None:
    """The failure that ended a start, from its events, completed by what the rank itself recorded.

    If no event states what ended it, it is the first failure of `generation`, the last one: the run has recovered from
    earlier ones.
    """
    event = next((e for e in reversed(events) if e.kind == "run_failed"), None)
    if event is None:
        event = next((e for e in events if e.generation == generation and is_failure(e)), None)
    return None if event is None else Failure.from_event(event).completed(folder, generation)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
