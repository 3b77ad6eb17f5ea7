"""The state of a run, and its reason: one table, used by every view and docs/run-folder.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from seatrial.record.events import Event
from seatrial.record.running import Running

State = Literal["not started", "queued", "running", "finished", "failed", "preempted", "stopped"]

ENDS = ("run_finished", "run_failed", "run_interrupted")
_FAILED_PARTS = ("rank_failed", "nursery_failed", "agent_failed")
NUMERIC_FAULTS = ("nonfinite", "loss_spike")
WAIT_REPORTED_S = 5.0  # a wait for nodes becomes an event, `waiting_for_nodes`, after this time
# All event kinds that decide a state.
KINDS = (
    *(*ENDS, *_FAILED_PARTS, *NUMERIC_FAULTS),
    *("run_started", "coordinator_elected", "recovering", "recovered", "preempted"),
)


@dataclass(frozen=True)
class Facts:
    """The facts that decide the state of a run, all about its last start."""

    by: Running | None  # process or scheduled start, if running
    events: Sequence[Event]
    generation: int  # the last generation of this start
    stepped: bool  # this start has recorded a step
    ever_stepped: bool  # this start or an earlier one has recorded a step
    complete: bool  # the job's last step is done and has a checkpoint

    @property
    def end(self) -> Event | None:
        """The event that ended it."""
        return _last(self.events, ENDS)

    @property
    def alive(self) -> bool:
        """Whether it is running. After recording the end, a process may briefly hold the lock while printing."""
        return self.by is not None and self.end is None

    @property
    def queued(self) -> bool:
        """Whether it was submitted to a scheduler and no agent has started."""
        submitted = self.alive and self.by is not None and self.by.launch is not None
        return submitted and _last(self.events, ("coordinator_elected",)) is None

    @property
    def recovering(self) -> Event | None:
        """The failure being recovered from."""
        last = _last(self.events, ("recovering", "recovered"))
        return last if last is not None and last.kind == "recovering" else None

    @property
    def failed_part(self) -> Event | None:
        """The first failed component of the last generation; earlier failures were recovered from."""
        return next((e for e in self.events if e.generation == self.generation and is_failure(e)), None)


@dataclass(frozen=True)
class Row:
    """A row of the table; the first one that matches decides."""

    state: State
    when: str
    reason: str  # `{message}`: that of the event that matched
    about: Callable[[Facts], Event | bool | None]  # the event that matched, or whether the row matches


TABLE = (
    Row(
        "queued",
        "a scheduler has it, no `coordinator_elected` of this start",
        "{who} has not started",
        lambda f: f.queued,
    ),
    Row(
        "running",
        "it runs, no step of this start yet",
        "{who} is starting it",
        lambda f: f.alive and not f.stepped,
    ),
    Row(
        "running",
        "it runs, `recovering` without `recovered`",
        "{who} is recovering it: {message}",
        lambda f: f.recovering if f.alive else None,
    ),
    Row("running", "it runs", "{who} is training it", lambda f: f.alive),
    Row("finished", "`run_finished`", "{message}", lambda f: _ended(f, "run_finished")),
    Row(
        "failed",
        "`run_failed`, after `nonfinite` or `loss_spike` whose `evidence` has the action `stop`",
        "it diverged, and no more steps may be skipped: {message}",
        lambda f: diverged(f.events) if _ended(f, "run_failed") else None,
    ),
    Row("failed", "`run_failed`", "{message}", lambda f: _ended(f, "run_failed")),
    Row(
        "preempted",
        "`run_interrupted` with `preempted`",
        "stopped on request: {message}; the same command resumes",
        lambda f: (_last(f.events, ("preempted",)) or f.end) if _ended(f, "run_interrupted", True) else None,
    ),
    Row("stopped", "`run_interrupted` without it", "{message}", lambda f: _ended(f, "run_interrupted")),
    Row(
        "finished",
        "none of these, the job's last step is done and saved",
        "all steps are done; no process was left to record the end",
        lambda f: f.complete,
    ),
    Row(
        "failed",
        "none of these, and a part of its last generation failed",
        "it ended without recording an outcome, after: {message}",
        lambda f: f.failed_part,
    ),
    Row(
        "stopped",
        "none of these, and it was started",
        "it ended without recording an outcome: killed, or the machine went down",
        lambda f: f.ever_stepped or _last(f.events, ("run_started",)),
    ),
    Row("not started", "none of these", "no step was ever started", lambda f: True),
)


def state_of(facts: Facts) -> tuple[State, str]:
    """State and reason, from the table."""
    for row in TABLE:
        about = row.about(facts)
        if about:
            who = "" if facts.by is None else facts.by.who
            message = about.message if isinstance(about, Event) else ""
            return row.state, row.reason.format(who=who, message=message)
    raise AssertionError("the last row always holds")


def diverged(events: Sequence[Event]) -> Event | None:
    """The event that ended a diverged start: one non-finite step or loss spike too many.

    Resuming would reach the same step with the same budget, and fail in the same way.
    """
    for event in reversed(events):
        evidence = (event.data or {}).get("evidence")
        if event.kind in NUMERIC_FAULTS and isinstance(evidence, dict) and evidence.get("action") == "stop":
            return event
    return None


def is_failure(event: Event) -> bool:
    """Whether a component of the run failed: a rank, an agent, a fork server."""
    return event.severity == "error" and event.kind in _FAILED_PARTS


def _ended(facts: Facts, kind: str, preempted: bool = False) -> Event | None:
    end = facts.end
    if end is None or end.kind != kind:
        return None
    return end if not preempted or (end.data or {}).get("preempted") is True else None


def _last(events: Sequence[Event], kinds: Sequence[str]) -> Event | None:
    return next((e for e in reversed(events) if e.kind in kinds), None)
