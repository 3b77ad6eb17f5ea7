"""Runs with random faults whose losses are known: what a run's folder would hold, and where its time truly went.

`Story` is a small model of a run, written from docs/watch.md and not from the code: it has a clock, does steps, saves,
fails in several ways, and adds up the truth as it goes. What it writes is what a coordinator and rank 0 would know.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.step_log import StepLog

BEGIN = 1_800_000_000.0
CLASSES = {"worker_killed": "process", "hang": "process", "node_silent": "node", "xid:79": "gpu"}


class Story:
    """Plays a run; then `events` and `log` are its records, and `truth` has the seconds of each cause."""

    def __init__(self, seed: int, *, steps: int = 400, nodes: int = 4, step_s: float = 1.0) -> None:
        self.random = random.Random(seed)
        self.nodes, self.wanted, self.step_s = nodes, steps, step_s
        self.now = BEGIN
        self.truth: Counter[str] = Counter()
        self.by_class: Counter[str] = Counter()
        self.faults = 0
        self.partial = 0.0  # bound of what cannot be known: at most one step for each fault
        self.events: list[Event] = []
        self.log = StepLog()
        self.generation = self.step = self.snapshot = self.saved = 0
        self.shape = nodes
        self.validated: dict[int, float] = {}
        self.unrecorded: tuple[int, float] | None = None
        self.done: list[
            tuple[int, float, float]
        ] = []  # steps that count: their seconds, and share of the nodes

    # -- the records

    def event(self, kind: str, severity: str = "info", node: int | None = None, **data: Any) -> None:
        self.events.append(Event(self.now, self.generation, kind, severity, kind, node, None, data or None))

    def spend(self, seconds: float, cause: str, cls: str | None = None) -> None:
        self.now += seconds
        self.truth[cause] += seconds
        if cls is not None:
            self.by_class[cls] += seconds

    # -- what happens

    def start(self, how: str | None = None) -> None:
        self.generation += 1
        self.event("run_started", **({} if how is None else {"scheduled": how}))
        if how == "submitted":
            self.spend(self.random.uniform(10, 500), "queue")
        self.event("coordinator_elected", term=self.generation)
        for node in range(self.nodes):
            self.event("node_joined", node=node, spare=False)
        self.spend(self.random.uniform(1, 10), "start")
        self.begin("start")

    def begin(self, cause: str, cls: str | None = None) -> None:
        slots = {str(slot): slot for slot in range(self.shape)}
        self.event("generation_started", slots=slots)
        self.spend(self.random.uniform(1, 10), cause, cls)
        if self.unrecorded is not None:
            self.generation -= 1
            self.record(*self.unrecorded)
            self.generation += 1
            self.unrecorded = None
        self.first = cause
        self.first_class = cls

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self, *, late: bool = False) -> None:
        seconds = self.step_s * self.nodes / self.shape * self.random.uniform(0.98, 1.02)
        extra = 0.0
        if self.first:
            extra = self.random.uniform(0.5, 5.0) * self.step_s
            self.spend(extra, "warm_up" if self.first == "start" else self.first, self.first_class)
            self.first = ""
        self.now += seconds
        full = self.shape / self.nodes
        self.truth["productive"] += seconds * full
        self.truth["shrunk"] += seconds * (1 - full)
        self.step += 1
        self.done.append((self.step, seconds, full))
        if late:  # rank 0 does not live to record it
            self.unrecorded = (self.step, seconds + extra)
        else:
            self.record(self.step, seconds + extra)
        if self.step % 10 == 0:
            self.snapshot = self.step

    def validate(self) -> None:
        """After the last step: it is recorded with that."""
        self.spend(seconds := self.random.uniform(1, 3), "validation")
        self.log.validation[-1] = seconds
        self.validated[self.step] = seconds

    def record(self, step: int, seconds: float) -> None:
        late = self.random.uniform(0, 1e-3)  # the record is made a little after the step
        self.log.add(
            MetricsRecord(
                step,
                step,
                2.0,
                1.0,
                1e-3,
                seconds,
                0.0,
                1.0,
                1.0,
                None,
                None,
                self.now + late,
                self.generation,
            )
        )

    def save(self) -> None:
        self.spend(self.random.uniform(0.05, 3.0), "checkpoint")
        self.saved = self.step
        self.event("checkpoint_saved", step=self.step)

    def throw_away(self, step: int, cls: str | None) -> None:
        """The steps after `step` did not count after all."""
        while self.done and self.done[-1][0] > step:
            thrown, seconds, full = self.done.pop()
            self.truth["productive"] -= seconds * full
            self.truth["shrunk"] -= seconds * (1 - full)
            validated = self.validated.pop(thrown, 0.0)
            self.truth["validation"] -= validated
            self.truth["redone"] += (seconds := seconds + validated)
            if cls is not None:
                self.by_class[cls] += seconds
        self.step = step

    def fail(self, signal: str, source: str, *, spare_after: float | None = None) -> None:
        cls = CLASSES[signal]
        self.faults += 1
        length = self.step_s * self.nodes / self.shape
        into = self.random.uniform(0, 1) * length  # the step
        self.spend(into, "redone", cls)
        self.partial += length
        delay = self.random.uniform(0.01, 0.3) if signal == "worker_killed" else self.random.uniform(5, 60)
        self.spend(delay, "detection", cls)
        self.event("recovering", "warning", 1, signal=signal, **{"class": cls}, cause=signal, step=self.step)
        self.throw_away({"carried": self.step, "memory": self.snapshot, "disk": self.saved}[source], cls)
        self.snapshot = min(self.snapshot, self.step)
        self.spend(self.random.uniform(0.1, 2), "recovery", cls)
        if spare_after is not None:
            self.event("node_lost", "error", 1)
            self.spend(5.0, "waiting", cls)
            self.event("waiting_for_nodes", "warning", usable=self.nodes - 1, needed=self.nodes)
            self.spend(spare_after, "waiting", cls)
            self.event("node_joined", node=1, spare=False)
        self.generation += 1
        self.begin("recovery", cls)
        self.event("recovered", step=self.step, source=source)

    def fail_again(self) -> None:
        """Right after a recovery has begun, before any step."""
        self.spend(self.random.uniform(1, 5), "recovery", "gpu")
        self.faults += 1
        self.event(
            "recovering",
            "warning",
            2,
            signal="worker_killed",
            **{"class": "process"},
            cause="",
            step=self.step,
        )
        self.spend(self.random.uniform(1, 5), "recovery", "process")
        self.generation += 1
        self.begin("recovery", "process")
        self.event("recovered", step=self.step, source="memory")

    def not_finite(self) -> None:
        """A step's loss is NaN: back to the snapshot in memory, in the same generation."""
        if self.first:
            return
        self.spend(self.step_s * self.nodes / self.shape, "redone", "numerics")
        self.throw_away(self.snapshot, "numerics")
        evidence = {"action": "roll back"}
        self.event("nonfinite", "warning", signal="nonfinite", **{"class": "numerics"}, evidence=evidence)
        self.spend(self.random.uniform(0.1, 1), "redone", "numerics")

    def change(self, shape: int) -> None:
        """A planned restart on another number of nodes."""
        self.event("node_leaving", "warning", 1)
        self.spend(self.random.uniform(1, 5), "reshape")
        self.shape = shape
        self.generation += 1
        self.begin("reshape")
        self.event("recovered", step=self.step, source="disk")

    def preempt(self, how: str) -> None:
        """Saved and ended; `how` it goes on: a job that waits, a person, or a new submission."""
        self.save()
        self.spend(self.random.uniform(0.1, 2), "ending")
        self.event("run_interrupted", "warning", preempted=True)
        self.spend(self.random.uniform(100, 1000), "queue" if how == "continued" else "stopped")
        self.shape = self.nodes
        self.start(how)

    def vanish(self) -> None:
        """All processes die, and nobody is left to say so: what was not saved is done again."""
        self.throw_away(self.saved, None)
        self.snapshot = self.saved
        self.spend(self.random.uniform(100, 1000), "unknown")
        self.shape = self.nodes
        self.start()

    def give_up(self) -> None:
        cls = "process"
        self.faults += 1
        into = self.random.uniform(0, 1) * self.step_s * self.nodes / self.shape
        self.spend(into, "redone", cls)
        self.partial += self.step_s * self.nodes / self.shape
        self.spend(self.random.uniform(10, 20), "detection", cls)
        data = {"signal": "hang", "class": cls, "cause": "hang", "step": self.step}
        self.event("recovering", "warning", 1, **data)
        self.event("gave_up", "error", 1, **data)
        self.spend(self.random.uniform(0.1, 1), "ending")
        self.event("run_failed", "error", 1, cause="hang")
        self.spend(self.random.uniform(100, 1000), "stopped")
        self.throw_away(self.saved, cls)
        self.snapshot = self.saved
        self.shape = self.nodes
        self.start("submitted")

    def finish(self) -> None:
        self.train(max(5, self.wanted - self.step))
        self.save()
        self.spend(self.random.uniform(0.1, 2), "ending")
        self.event("run_finished")

    def play(self) -> Story:
        """Random faults to the end."""
        pick = self.random
        self.start(pick.choice([None, "submitted"]))
        for _ in range(pick.randint(3, 12)):
            self.train(pick.randint(3, 60))
            if pick.random() < 0.5:
                self.save()
                self.train(pick.randint(1, 5))
                self.validate()
                self.train(pick.randint(0, 3))
            match pick.choice(
                [
                    *("killed", "killed late", "hang", "silent", "again"),
                    *("nan", "shrink", "preempt", "vanish", "give up"),
                ]
            ):
                case "killed":
                    self.fail("worker_killed", pick.choice(["carried", "memory"]))
                case "killed late":
                    self.one_step(late=True)
                    self.fail("worker_killed", "carried")
                case "hang":
                    self.fail("hang", "memory")
                case "silent":
                    self.fail("node_silent", "disk", spare_after=pick.uniform(1, 100))
                case "again":
                    self.fail("xid:79", "memory")
                    self.fail_again()
                case "nan":
                    self.not_finite()
                case "shrink":
                    self.change(self.nodes - 1 if self.shape == self.nodes else self.nodes)
                case "preempt":
                    self.preempt(pick.choice(["continued", "submitted"]))
                case "vanish":
                    self.vanish()
                case "give up":
                    self.give_up()
        self.finish()
        return self
