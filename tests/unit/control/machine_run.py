"""A control machine to tell stories with: its clock, and the events that follow from one another."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from seatrial.control.machine import types as m
from seatrial.control.machine.machine import Machine
from seatrial.control.machine.policy import Rule
from seatrial.control.machine.types import Settings

ACTIONS = {
    "worker_exit": ("restart", "evict"),
    "oom": ("restart", None),
    "hang": ("restart", "evict"),
    "agent_exit": ("restart", "evict"),
    "node_silent": ("restart", "evict"),
    "xid:79": ("evict", None),
    "xid:74": ("reset", "evict"),
    "xid:45": ("record", None),
    "slow": ("tolerate", "evict"),
    "app_error": ("stop", None),
}
RULES = {name: Rule(name, "test", action, repeat, "test") for name, (action, repeat) in ACTIONS.items()}  # type: ignore[arg-type]

A = TypeVar("A")


class Run:
    """A machine with a clock. Every call returns what the machine wants then; `all` has everything it ever wanted."""

    def __init__(
        self, slots: int = 2, spares: int = 0, *, memory: dict[str, Any] | None = None, **options: Any
    ) -> None:
        options.setdefault("shapes", (slots,))
        self.settings = Settings(slots=slots, spares=spares, **options)
        self.machine = Machine(self.settings, memory, RULES.__getitem__)
        self.now = 100.0
        self.all: list[m.Action] = []

    def tell(self, kind: type[m.Event], *args: Any) -> list[m.Action]:
        actions = self.machine.handle(kind(self.now, *args))
        json.dumps(self.machine.memory())
        self.all += actions
        return actions

    def join(self, *nodes: int, running: int | None = None, ready: bool = True) -> list[m.Action]:
        return [a for node in nodes for a in self.tell(m.Joined, node, ready, running)]

    def fail(
        self,
        node: int,
        signal: str = "worker_exit",
        *,
        rank: int | None = None,
        step: int = 5,
        generation: int | None = None,
    ) -> list[m.Action]:
        g = self.machine.generation if generation is None else generation
        return self.tell(m.Failed, g, node, rank, signal, f"{signal} on {node}", step)

    def stopped(self, *nodes: int) -> list[m.Action]:
        return [a for node in nodes for a in self.tell(m.Stopped, self.machine.generation, node)]

    def left(self, how: str, *nodes: int) -> list[m.Action]:
        return [a for node in nodes for a in self.tell(m.Finished, self.machine.generation, node, how)]

    def progress(self, step: int) -> list[m.Action]:
        return self.tell(m.Progress, self.machine.generation, step)

    def leave(self, *nodes: int, grace_s: float = 60.0) -> list[m.Action]:
        return [a for node in nodes for a in self.tell(m.Leaving, node, grace_s)]

    def wait(self, seconds: float | None = None) -> list[m.Action]:
        """Let time pass, or to the machine's next deadline."""
        if seconds is None:
            deadline = self.machine.deadline()
            assert deadline is not None, "the machine waits for nothing"
            self.now = deadline
        else:
            self.now += seconds
        return self.tell(m.Tick)

    def successor(self) -> Run:
        """The run under the next coordinator, whose clock is another one."""
        run = Run.__new__(Run)
        run.settings, run.now, run.all = self.settings, 5.0, []
        run.machine = Machine(self.settings, json.loads(json.dumps(self.machine.memory())), RULES.__getitem__)
        return run


def only(actions: list[m.Action], kind: type[A]) -> A:
    (found,) = [a for a in actions if isinstance(a, kind)]
    return found


def none(actions: list[m.Action], *kinds: type[Any]) -> bool:
    return not any(isinstance(a, kinds) for a in actions)


def notes(actions: list[m.Action]) -> list[str]:
    return [a.kind for a in actions if isinstance(a, m.Note)]


def started(slots: int = 2, spares: int = 0, **options: Any) -> Run:
    """A run whose first generation is at work on nodes 0, 1, ...; the spares are ready."""
    run = Run(slots, spares, **options)
    run.join(*range(slots, slots + spares), *range(slots))
    assert run.machine.phase == "running"
    return run


def shrinking(**options: Any) -> Run:
    """A run on four nodes that has just lost node 1; it may go on with two nodes or one."""
    run = started(4, shapes=(4, 2, 1), **options)
    run.progress(10)
    run.tell(m.Lost, 1, True, "died")
    return run


def small(**options: Any) -> Run:
    """A run for two nodes that works on node 0 alone: its second generation."""
    run = started(2, shapes=(2, 1), **options)
    run.tell(m.Lost, 1, True, "died")
    run.stopped(0)
    run.tell(m.Flushed, 0, False)
    assert run.machine.shape == 1
    return run
