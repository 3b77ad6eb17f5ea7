"""What a run folder says about its run, put together; works while it runs, after it died, and if it never started."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from seatrial.base.files import parse_toml, read_json, read_text
from seatrial.record import lock
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem
from seatrial.record.ledger import ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord, current_history, read_metrics

State = Literal["not started", "running", "finished", "failed", "preempted", "stopped"]

ETA_WINDOW = 20  # steps whose median time makes the ETA

# What is written when a run's folder is opened, whether or not anything is started then.
_OF_OPENING = ("job_changed", "layout_chosen")

_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    where: str  # path or address
    time: float  # unix seconds when it was completed


@dataclass(frozen=True)
class Failure:
    """What ended the run, as far as anybody could write it down."""

    cause: str
    node: int | None = None
    rank: int | None = None
    traceback: str | None = None  # or the last lines of the log, where there is none
    log: Path | None = None
    hint: str | None = None

    def completed(self, folder: RunFolder, generation: int) -> Failure:
        """With traceback, log and hint of the rank, where they are missing here and are in the folder."""
        if self.node is None or self.rank is None:
            return self
        log = self.log or folder.rank_log(generation, self.node, self.rank)
        written = _read_json(log.with_suffix(".error.json"))
        return Failure(
            self.cause,
            self.node,
            self.rank,
            _text(written.get("traceback")) or self.traceback,
            self.log or (log if log.exists() else None),
            self.hint or _text(written.get("hint")),
        )


@dataclass(frozen=True)
class JobFacts:
    """The few values of job.toml that a view needs; None where the file does not tell."""

    steps: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None


@dataclass
class RunView:
    """A run as its folder shows it at one moment."""

    folder: RunFolder
    state: State
    state_reason: str
    pid: int | None  # of the process that runs it
    generation: int  # 0: never started
    first_generation: int  # of the last start; each recovery is a further one
    job: JobFacts
    metrics: list[MetricsRecord]  # the steps that led to where it stands, by step
    events: list[Event]
    checkpoints: list[CheckpointInfo]  # complete ones, by step
    latest: CheckpointInfo | None
    failure: Failure | None
    ledger_steps: int
    ledger_gaps: list[str]
    skipped_steps: list[int] = field(default_factory=list)  # left out on purpose: no update was made
    problems: list[Problem] = field(default_factory=list)

    @property
    def last(self) -> MetricsRecord | None:
        return self.metrics[-1] if self.metrics else None

    @property
    def first(self) -> MetricsRecord | None:
        return self.metrics[0] if self.metrics else None

    def of_start(self) -> list[MetricsRecord]:
        """The steps of the last start."""
        return [m for m in self.metrics if m.generation >= self.first_generation]

    @property
    def sample(self) -> dict[str, Any] | None:
        """{"prompt", "text"} of the last text that the trained model generated."""
        for event in reversed(self.events):
            if event.kind == "sample" and event.data is not None:
                return event.data
        return None

    def wall_time_s(self, now: float) -> float | None:
        """Seconds from the last start to its last sign of life, or to `now` while it runs."""
        times = [e.time for e in self.events if e.generation >= self.first_generation]
        times += [m.time for m in self.of_start()]
        if not times:
            return None
        return (now if self.state == "running" else max(times)) - min(times)


def read_view(folder: RunFolder) -> RunView:
    """Everything the folder tells. Damaged files become `problems`, never exceptions."""
    # The lock first: a run that ends while its files are read is then shown as running, not as stopped.
    held = lock.is_held(folder.lock)
    events, problems = read_events(folder)
    metrics, wrong_metrics = read_metrics(folder)
    ledger, wrong_ledger = read_ledger(folder)
    facts, wrong_job = read_job_facts(folder)
    problems += wrong_metrics + wrong_ledger + wrong_job
    # A start that found everything done already, or was refused, did nothing that the view should be about.
    known = [e.generation for e in events if e.kind not in _OF_OPENING] + [m.generation for m in metrics]
    opened = folder.last_generation()
    generation = max([opened, *known]) if held or not known else max(known)
    first = _first_generation(events, generation)
    own = [e for e in events if e.generation >= first]
    state, reason = _state(held, own, generation, bool(metrics))
    checkpoints, latest = read_checkpoints(folder, events)
    history = current_history(metrics)
    gaps = ledger_gaps(ledger, facts.global_batch) if facts.global_batch else []
    # While it runs, the ledger may be a step behind the metrics; afterwards it may not.
    if not held and history and history[-1].step > (ledger[-1].step if ledger else 0):
        gaps.append(f"step {history[-1].step} of metrics.jsonl is not in the ledger")
    return RunView(
        folder=folder,
        state=state,
        state_reason=reason,
        pid=lock.holder(folder.lock) if held else None,
        generation=generation,
        first_generation=first,
        job=facts,
        metrics=history,
        events=events,
        checkpoints=checkpoints,
        latest=latest,
        failure=find_failure(folder, own, generation) if state == "failed" else None,
        ledger_steps=len(ledger),
        ledger_gaps=gaps,
        skipped_steps=[r.step for r in ledger if r.skipped],
        problems=problems,
    )


def read_job_facts(folder: RunFolder) -> tuple[JobFacts, list[Problem]]:
    """From job.toml, without checking it: a run of another version must still be seen."""
    try:
        train = parse_toml(read_text(folder.job_toml)).get("train")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return JobFacts(), [Problem(folder.job_toml.name, 0, f"cannot be used ({reason})")]
    values = train if isinstance(train, dict) else {}

    def whole(key: str) -> int | None:
        value = values.get(key)
        return value if type(value) is int and value > 0 else None

    return JobFacts(whole("steps"), whole("global_batch"), whole("sequence_length")), []


def read_checkpoints(
    folder: RunFolder, events: list[Event]
) -> tuple[list[CheckpointInfo], CheckpointInfo | None]:
    """The complete checkpoints (those with a manifest) by step, and the one that `latest` names, else the newest.

    Of those that lie elsewhere, nobody is asked what is there: of them it is the newest that the events tell of.
    """
    found = []
    try:
        paths = list(folder.checkpoints.iterdir())
    except OSError:
        paths = []
    for path in paths:
        match = _STEP_FOLDER.fullmatch(path.name)
        if match is None:
            continue
        try:
            found.append(CheckpointInfo(int(match[1]), str(path), (path / "manifest.json").stat().st_mtime))
        except OSError:  # half written, or removed while we look
            continue
    found.sort(key=lambda c: c.step)
    try:
        named = read_text(folder.checkpoints / "latest", links=True).strip()
    except (OSError, ValueError):
        named = ""
    latest = next((c for c in found if Path(c.where).name == named), found[-1] if found else None)
    elsewhere = _saved_elsewhere(folder, events)
    if elsewhere is not None and (latest is None or elsewhere.step > latest.step):
        found.append(elsewhere)
        latest = elsewhere
    return found, latest


def _saved_elsewhere(folder: RunFolder, events: list[Event]) -> CheckpointInfo | None:
    """The newest checkpoint that was saved into another place than the run folder, and not set aside since."""
    saved: dict[int, CheckpointInfo] = {}
    for event in events:
        step, where = (event.data or {}).get("step"), (event.data or {}).get("folder")
        if not isinstance(step, int):
            continue
        if event.kind == "checkpoint_set_aside":
            saved.pop(step, None)
        elif event.kind == "checkpoint_saved" and isinstance(where, str):
            saved.pop(step, None)
            # By its name: the folder may be a copy, and lie in another place than when that was written.
            if "://" in where or Path(where).parent.name != folder.checkpoints.name:
                saved[step] = CheckpointInfo(step, where, event.time)
    return saved[max(saved)] if saved else None


def find_failure(folder: RunFolder, events: list[Event], generation: int) -> Failure | None:
    """The failure that ended a start, from its events, completed by what the rank itself wrote down.

    Where nobody said what ended it, it is the first failure of `generation`, the last one: the run has recovered from
    those before.
    """
    told = next((e for e in reversed(events) if e.kind == "run_failed"), None)
    if told is None:
        told = next((e for e in events if e.generation == generation and _is_failure(e)), None)
    if told is None:
        return None
    data = told.data or {}
    # The launcher writes where it happened into `data`; the event's own node and rank may be the writer's.
    node, rank = _whole(data.get("node")), _whole(data.get("rank"))
    node = told.node if node is None else node
    rank = told.rank if rank is None else rank
    log = _text(data.get("log"))
    failure = Failure(
        _text(data.get("cause")) or told.message,
        node,
        rank,
        _text(data.get("tail")),
        Path(log) if log else None,
        _text(data.get("hint")),
    )
    return failure.completed(folder, generation)


def eta_s(step_times: list[float], steps_left: int) -> float | None:
    """Seconds until the end, from the median of the last 20 step times; None before the first step."""
    if not step_times:
        return None
    return median(step_times[-ETA_WINDOW:]) * max(0, steps_left)


def _first_generation(events: list[Event], generation: int) -> int:
    """The generation with which the start began that `generation` belongs to.

    A recovery is a generation that the coordinator started within a start. Any other one is a start of its own, also
    where it has said nothing yet.
    """
    started = {e.generation for e in events if e.kind == "run_started"}
    coordinated = {e.generation for e in events if e.kind == "generation_started"}
    while generation in coordinated - started and generation > 1:
        generation -= 1
    return generation


def _state(held: bool, events: list[Event], generation: int, has_metrics: bool) -> tuple[State, str]:
    """State and the reason in words, from the events of the last start; `generation` is its last one."""
    if held:
        return "running", "a process holds the run"
    kinds = [e.kind for e in events]
    last = next(
        (e for e in reversed(events) if e.kind in ("run_finished", "run_failed", "run_interrupted")), None
    )
    if last is None:
        failed = next((e for e in events if e.generation == generation and _is_failure(e)), None)
        if failed is not None:
            return "failed", failed.message
        if "run_started" in kinds or has_metrics:
            return "stopped", "it ended without saying why: killed, or the machine went down"
        return "not started", "no step was ever begun"
    states: dict[str, State] = {"run_finished": "finished", "run_failed": "failed"}
    if (last.data or {}).get("preempted") is True:
        return "preempted", last.message
    return states.get(last.kind, "stopped"), last.message


def _is_failure(event: Event) -> bool:
    """A part of the run failed: rank_failed, agent_failed, ..."""
    return event.severity == "error" and event.kind in ("rank_failed", "nursery_failed", "agent_failed")


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
