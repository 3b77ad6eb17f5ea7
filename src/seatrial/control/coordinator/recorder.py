"""What the coordinator writes: events for the user, and a log of its decisions with the event behind each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from seatrial.base.complain import complain
from seatrial.base.process import open_log
from seatrial.control.machine.policy import Rule
from seatrial.control.net.lease import Lease
from seatrial.record import events
from seatrial.record import messages as msg
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.recent import recorded_marks


class Recorder:
    """Writes on behalf of one coordinator. A full disk must not end the run: it is reported on stderr."""

    def __init__(self, folder: RunFolder, generation: int, lease: Lease) -> None:
        self.folder = folder
        self.generation = generation
        self._lease = lease
        self._recorded: set[str] | None = None  # marks of all recorded events, by any coordinator of the run
        self._unwritten: list[Event] = []  # events of others that could not be written yet

    def event(
        self,
        kind: str,
        message: str,
        *,
        severity: str = "info",
        node: int | None = None,
        rank: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Append one event, unless the mark in its `data` ("told", see `Journal`) was recorded before."""
        if data is not None and data.get("told") is None:
            data = {key: value for key, value in data.items() if key != "told"}
        try:
            self._write(Event(time.time(), self.generation, kind, severity, message, node, rank, data))
        except OSError as error:
            complain(f"could not record {kind} ({message}): {error}")

    def record(self, record: msg.Record) -> None:
        """Append an event of another process with its original time, and its mark."""
        values = {f.name: getattr(record, f.name) for f in fields(Event)}
        event = Event(**values | {"data": {**(record.data or {}), "told": record.told}})
        try:
            self._write(event)
        except OSError as error:
            complain(f"could not record {event.kind} yet ({event.message}): {error}")
            self._unwritten.append(event)

    def sync(self) -> None:
        """Sync all events of others to disk, including those that could not be written before. Raises OSError."""
        while self._unwritten:
            events.write(self.folder, self._unwritten[0])
            del self._unwritten[0]
        events.sync(self.folder)

    def _write(self, event: Event) -> None:
        mark = (event.data or {}).get("told")
        if mark is not None and self._recorded is None:
            # Read from the file itself: an earlier coordinator may have died right after it wrote, or right before.
            self._recorded = recorded_marks(self.folder)
        if self._recorded is not None and mark is not None:
            if mark in self._recorded:
                return
            self._recorded.add(mark)
        events.write(self.folder, event)

    def finding(
        self,
        signal: str,
        message: str,
        rule: Rule,
        *,
        evidence: dict[str, Any] | None,
        node: int | None,
        rank: int | None = None,
        step: int | None = None,
        gpu: str | None = None,
        port: str | None = None,
        told: str | None = None,
    ) -> None:
        """Record an abnormal driver message, counter or value, with the policy's rule for it.

        `node` and `rank` are those that the evidence points to, not the reporter's.
        """
        kind = signal if signal in _OWN_KINDS else "signal"
        data = {"signal": signal, "class": rule.cls, "action": rule.action, "source": rule.source}
        if rule.hint is not None:
            data["hint"] = rule.hint
        where = {"step": step, "gpu": gpu, "port": port}
        more = {key: value for key, value in where.items() if value is not None}
        self.event(
            kind,
            message,
            severity="info" if rule.action == "ignore" else "warning",
            node=node,
            rank=rank,
            data={**data, "evidence": evidence, **more, "told": told},
        )

    def log(self, event: object, actions: Sequence[object]) -> None:
        """Append one decision to control/coordinator.log."""
        line = {
            "time": time.time(),
            "term": self._lease.term,
            "event": _as_json(event),
            "actions": [_as_json(a) for a in actions],
        }
        try:
            with open(open_log(self.folder.coordinator_log), "a", encoding="utf-8") as f:
                f.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            complain(f"could not write the coordinator's log: {error}")


_OWN_KINDS = frozenset({"nonfinite", "loss_spike", "corruption", "straggler"})


def _as_json(thing: Any) -> dict[str, Any]:
    return {"kind": type(thing).__name__, **asdict(thing)}
