"""Failures, recoveries and nodes of a run as text, from its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from seatrial.base import units
from seatrial.record.events import Event

# The message is complete.
_STYLES = {
    "node_lost": "bold red",
    "node_evicted": "bold red",
    "gave_up": "bold red",
    "process_stopped": "yellow",
    "shrunk": "yellow",
    "waiting_for_nodes": "yellow",
    "node_leaving": "yellow",
    "node_left": "yellow",
    "node_replaced": "yellow",
    "preempted": "yellow",
    "step_skipped": "yellow",
    "grown": "green",
    "node_requalified": "dim",
    "snapshot_flushed": "dim",
}

# What the ranks do about a bad step.
_MENDED = {
    "redo": "redoing it",
    "roll back": "rolling back to the last snapshot in memory",
    "skip": "skipping it",
    "stop": "no more steps may be skipped",
}


def message_of(event: Event) -> str:
    """The message, and for a bad step the action taken."""
    evidence = (event.data or {}).get("evidence")
    action = evidence.get("action") if isinstance(evidence, dict) else None
    follows = _MENDED.get(str(action)) if event.kind in ("nonfinite", "loss_spike") else None
    return event.message if follows is None else f"{event.message}: {follows}"


class Line(NamedTuple):
    """One line, with its style on a terminal."""

    text: str
    style: str


class Recoveries:
    """Summarises recoveries; takes a start's events in order."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.seconds: list[
            float
        ] = []  # durations of recoveries, from the decision until every rank has its state again
        self.redone = 0  # steps
        self.cause: str | None = None  # of the recovery in progress
        self.since: float | None = None  # unix seconds, when that began
        self._slots: dict[str, Any] = {}  # slot -> node, as of the last generation
        self._nodes = 0  # that began the run; higher-numbered nodes are spares
        for event in events:
            self.take(event)

    def take(self, event: Event) -> Line | None:
        """The line to show for `event`; None if there is nothing to show."""
        match event.kind:
            case "recovering":
                return self._began(event)
            case "recovered":
                return self._ended(event)
            case "generation_started":
                return self._started(event)
            case "coordinator_elected":
                # The first coordinator is elected at every start.
                return Line(event.message, "yellow") if _number(event, "term") > 1 else None
            case "node_joined":
                return Line(event.message, "dim") if self._slots else None
            case kind if kind in _STYLES:
                return Line(event.message, _STYLES[kind])
        return None

    def underway(self, now: float) -> str | None:
        """The recovery in progress and its duration; None while the run trains."""
        if self.since is None:
            return None
        return f"recovering for {max(0.0, now - self.since):.0f} s: {self.cause}"

    @property
    def total(self) -> str | None:
        """All recoveries on one line; None if there were none."""
        if not self.seconds:
            return None
        n = len(self.seconds)
        took = (
            f"in {units.duration(self.seconds[0])}"
            if n == 1
            else f"the longest {units.duration(max(self.seconds))}"
        )
        steps = "no step" if not self.redone else f"{self.redone:,} {'step' if self.redone == 1 else 'steps'}"
        return f"{n}, {took}, {steps} redone"

    def _began(self, event: Event) -> Line:
        # A further failure during a recovery is part of it.
        if self.since is None:
            self.since, self.cause = event.time, event.message
        text = event.message if event.message.startswith("recovering") else f"recovering: {event.message}"
        return Line(text, "yellow")

    def _ended(self, event: Event) -> Line:
        self.redone += _number(event, "redone")
        if self.since is None:  # the viewer started after the failure
            return Line(f"recovered: {event.message}", "green")
        took = max(0.0, event.time - self.since)
        self.seconds.append(took)
        self.since = self.cause = None
        return Line(f"recovered after {units.duration(took)}: {event.message}", "green")

    def _started(self, event: Event) -> Line | None:
        slots = (event.data or {}).get("slots")
        if not isinstance(slots, dict):
            return None
        before, self._slots = self._slots, slots
        if not before:
            self._nodes = len(slots)
            return None
        changes = [
            f"node {node}{' (a spare)' if self._is_spare(node) else ''} replaces node {before[slot]}"
            for slot, node in slots.items()
            if slot in before and before[slot] != node
        ]
        return Line("; ".join(changes), "yellow") if changes else None

    def _is_spare(self, node: object) -> bool:
        return isinstance(node, int) and node >= self._nodes


def _number(event: Event, key: str) -> int:
    value = (event.data or {}).get(key)
    return value if type(value) is int else 0
