"""Prove a run's ledger from its folder: reads the records that `record.proof` compares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from seatrial.record import metrics
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem, each_numbered
from seatrial.record.ledger import each_ledger_line
from seatrial.record.proof import Evidence, Proof, prove
from seatrial.record.running import running
from seatrial.record.states import ENDS
from seatrial.record.view import JobFacts, read_job_facts

_STARTED = ("run_started", "generation_started")


@dataclass(frozen=True)
class Audit:
    """What the records of a run prove, and the unreadable ones."""

    proof: Proof
    job: JobFacts
    events: list[Event]
    world_sizes: dict[int, int]  # generation -> number of ranks, if the events contain it
    live: bool  # a process runs the run, and kept writing while it was read
    problems: list[Problem] = field(default_factory=list)


def audit(folder: RunFolder) -> Audit:
    """Prove the ledger of `folder`. Unreadable lines become `problems`, and the rest is judged without them."""
    # The ledger last: a step's ledger line is written before any other record of the step.
    live = running(folder) is not None
    job, wrong_job = read_job_facts(folder)
    events, wrong_events = read_events(folder)
    trained, wrong_metrics = _trained(folder)
    evidence = Evidence(
        starts={} if wrong_events else _starts(events),
        trained=trained,
        skipped=frozenset(_skipped(events)),
        finished=_finished(events, job),
        events_whole=not wrong_events,
        metrics_whole=not wrong_metrics,
        live=live,
    )
    wrong_ledger: list[Problem] = []
    proof = prove(each_ledger_line(folder, wrong_ledger), job.batches, evidence)
    problems = wrong_job + wrong_events + wrong_metrics + wrong_ledger
    return Audit(proof, job, events, _world_sizes(events), live, problems)


def _starts(events: Iterable[Event]) -> dict[int, int]:
    """Generation -> step of the state that it resumed from."""
    starts: dict[int, int] = {}
    recovered: set[int] = set()
    for event in events:
        step = (event.data or {}).get("step")
        if event.kind in _STARTED:
            # No event contains the step of a generation that starts from scratch, except after a failure.
            starts.setdefault(event.generation, 0)
        elif type(step) is int and event.kind == "recovered":
            # Follows `resumed` if the state still in memory was newer than the checkpoint.
            starts[event.generation] = step
            recovered.add(event.generation)
        elif type(step) is int and event.kind == "resumed" and event.generation not in recovered:
            starts[event.generation] = step
    return starts


def _skipped(events: Iterable[Event]) -> Iterable[tuple[int, int]]:
    for event in events:
        step = (event.data or {}).get("step")
        if event.kind == "step_skipped" and type(step) is int:
            yield event.generation, step


def _finished(events: list[Event], job: JobFacts) -> int | None:
    """The job's last step, if the last start has finished it; job.toml is the one given to that start."""
    last = next((e for e in reversed(events) if e.kind in ("run_started", *ENDS)), None)
    return job.steps if last is not None and last.kind == "run_finished" else None


def _trained(folder: RunFolder) -> tuple[dict[int, list[int]], list[Problem]]:
    """Generation -> the steps in its metrics records, in file order."""
    problems: list[Problem] = []
    trained: dict[int, list[int]] = {}
    for line, values in each_numbered(folder.metrics, metrics.NOUN, problems):
        step, generation = values.get("step"), values.get("generation")
        if type(step) is int and type(generation) is int:
            trained.setdefault(generation, []).append(step)
        else:
            problems.append(Problem(folder.metrics.name, line, f"not {metrics.NOUN} (step or generation)"))
    return trained, problems


def _world_sizes(events: Iterable[Event]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for event in events:
        layout = (event.data or {}).get("layout")
        size = layout.get("world_size") if isinstance(layout, dict) else None
        if event.kind in _STARTED and type(size) is int:
            sizes[event.generation] = size
    return sizes
