"""What the coordinator writes: events for the user, and its own log for whoever must know why it decided so."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from seatrial.base.complain import complain
from seatrial.base.process import open_log
from seatrial.control.lease import Lease
from seatrial.control.policy import Rule
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.recent import told_marks


class Recorder:
    """Writes on behalf of one coordinator. A disk that takes no more must not end the run: it is said on stderr."""

    def __init__(self, folder: RunFolder, generation: int, lease: Lease) -> None:
        self.folder = folder
        self.generation = generation
        self._lease = lease
        self._told: set[str] | None = None  # marks of what was recorded, by whoever coordinated

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
        """Append one event. One whose `data` have a mark ("told", see `Journal`) that was recorded before is that event."""
        mark = (data or {}).get("told")
        if data is not None and mark is None:
            data = {key: value for key, value in data.items() if key != "told"}
        if mark is not None and not self._is_new(str(mark)):
            return
        try:
            events.append(
                self.folder,
                kind,
                message,
                severity=severity,  # type: ignore[arg-type]
                generation=self.generation,
                node=node,
                rank=rank,
                data=data,
            )
        except OSError as error:
            complain(f"could not record {kind} ({message}): {error}")

    def _is_new(self, mark: str) -> bool:
        """Whether nobody has recorded what has this mark: from now on somebody has."""
        if self._told is None:
            # In the file itself: whoever coordinated before may have died right after it wrote, or right before.
            self._told = told_marks(self.folder)
        new = mark not in self._told
        self._told.add(mark)
        return new

    def finding(
        self, values: dict[str, Any], node: int | None, rule: Rule, *, rank: int | None = None
    ) -> None:
        """A driver message, a counter or a number that is not as it should be, and what the policy says of it.

        `node` and `rank` are those that the evidence points at, not who tells.
        """
        signal = str(values["signal"])
        kind = signal if signal in _OWN_KINDS else "signal"
        data = {"signal": signal, "class": rule.cls, "action": rule.action, "source": rule.source}
        if rule.hint is not None:
            data["hint"] = rule.hint
        evidence = values.get("evidence") or values.get("data")
        more = {key: values[key] for key in ("step", "gpu", "port") if values.get(key) is not None}
        self.event(
            kind,
            str(values["message"]),
            severity="info" if rule.action == "ignore" else "warning",
            node=node,
            rank=rank,
            data={**data, "evidence": evidence, **more, "told": values.get("told")},
        )

    def log(self, event: object, actions: Sequence[object]) -> None:
        """One decision into control/coordinator.log."""
        line = {
            "time": time.time(),
            "term": self._lease.term,
            "event": _shown(event),
            "actions": [_shown(a) for a in actions],
        }
        try:
            with open(open_log(self.folder.coordinator_log), "a", encoding="utf-8") as f:
                f.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            complain(f"could not write the coordinator's log: {error}")


_OWN_KINDS = frozenset({"nonfinite", "loss_spike", "corruption", "straggler"})


def _shown(thing: Any) -> dict[str, Any]:
    return {"kind": type(thing).__name__, **asdict(thing)}
