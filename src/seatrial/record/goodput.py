"""Goodput: what every second of a run's wall-clock time went to, its effective training time ratio, and its failures.

The causes are defined in docs/watch.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from seatrial.record import timeline as tl
from seatrial.record.events import Event
from seatrial.record.launches import known_launch
from seatrial.record.mtbf import Mtbf, mtbf
from seatrial.record.nodes import nodes_of
from seatrial.record.states import ENDS
from seatrial.record.step_log import StepLog
from seatrial.record.timeline import Interruption, timeline

if TYPE_CHECKING:
    from seatrial.record.straggling import Straggling
    from seatrial.record.view import RunView

# In the order of the numbers in `timeline`.
LABELS = {
    "productive": "steps that count",
    "straggler": "waiting for the slowest rank's own work",
    "shrunk": "lower speed on fewer nodes",
    "queue": "in the scheduler's queue",
    "start": "starting, up to the first step",
    "warm_up": "first step of a start beyond a usual one (compilation, allocation, connections)",
    "detection": "from a failure to its detection",
    "recovery": "from the detection to the next step",
    "redone": "discarded steps: redone, or interrupted",
    "reshape": "planned change of nodes",
    "waiting": "waiting for nodes",
    "checkpoint": "training stopped for a checkpoint",
    "validation": "measuring the validation loss",
    "ending": "ending: last records, processes",
    "stopped": "between starts",
    "unknown": "unknown",
}
CAUSES = tuple(LABELS)
# Class of redone steps that no failure explains: a start was interrupted, or killed.
NOT_FAILED = "no failure"
_WITH_LOSS = (tl.DETECTION, tl.RECOVERY, tl.REDONE, tl.WAITING)


@dataclass(frozen=True)
class Goodput:
    """The time from `begin` to `end` (unix seconds) by cause; `seconds` of all CAUSES add up to `wall_s`."""

    begin: float
    end: float
    seconds: dict[str, float]
    by_class: dict[
        str, float
    ]  # class of failure -> seconds of detection, recovery, redone steps, waiting for nodes
    interruptions: list[Interruption]  # of the whole run, by time
    mtbf: Mtbf  # of the whole run
    node_mtbf: Mtbf
    idle_nodes: list[int]  # held without ranks at the end
    idle_node_s: dict[int, float]  # node -> seconds held without ranks, of the whole run
    straggling: Straggling | None  # the sample behind `straggler`
    notes: list[str] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return self.end - self.begin

    @property
    def held_s(self) -> float:
        """Without the time in which the run had no nodes."""
        return self.wall_s - self.seconds["queue"] - self.seconds["stopped"]

    @property
    def ettr(self) -> float | None:
        """Share of the time with nodes that was spent in steps that count, at the speed of all nodes. None: no time yet."""
        worked = self.seconds["productive"] + self.seconds["straggler"]
        return worked / self.held_s if self.held_s > 0 else None

    @property
    def mtbf_s(self) -> float | None:
        return self.mtbf.mean_s

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "begin": self.begin,
            "end": self.end,
            "wall_s": self.wall_s,
            "seconds": self.seconds,
            "ettr": self.ettr,
            "by_class": self.by_class,
            "interruptions": [vars(each) | {"lost_s": each.lost_s} for each in self.interruptions],
            "mtbf": vars(self.mtbf),
            "node_mtbf": vars(self.node_mtbf),
            "idle_nodes": self.idle_nodes,
            "idle_node_s": {str(node): s for node, s in self.idle_node_s.items()},
            "straggling": None if self.straggling is None else vars(self.straggling),
            "notes": self.notes,
        }


def goodput(
    view: RunView, now: float, *, since: float | None = None, straggling: Straggling | None = None
) -> Goodput:
    """Where the time went until the run's end, or until `now` if it runs. `view` must not be a brief one.

    `since`: only from then on; failures, MTBF and idle nodes are still of the whole run. `straggling`: as
    `record.straggling` measured it; without it the excess of stragglers is contained in productive time.
    """
    launch = known_launch(view.folder)
    queued = (
        launch.generation
        if launch is not None and launch.scheduled and launch.submitted == launch.generation
        else None
    )
    runs = view.state in ("running", "queued")
    found = timeline(view.events, view.log, now if runs else None, queued)
    begin, end = found.begin, max(found.begin, found.end)
    if since is not None:
        begin = min(max(begin, since), end)
    lengths = found.lengths(begin, end)
    sums = np.bincount(found.causes, lengths, len(CAUSES))
    notes = [
        "compilation is not recorded separately: it is part of `warm_up`, and after a failure of `recovery`"
    ]
    if straggling is None:
        notes.append("the excess of stragglers is not separated: it is in `productive`")
    else:
        sums[tl.STRAGGLER] = straggling.share * sums[tl.PRODUCTIVE]
        sums[tl.PRODUCTIVE] -= sums[tl.STRAGGLER]
    lost = np.where(np.isin(found.causes, _WITH_LOSS), lengths, 0.0)
    owners = np.bincount(found.owners + 1, lost, len(found.interruptions) + 1)
    redone = found.causes == tl.REDONE
    by_class = {NOT_FAILED: float(lost[redone & (found.owners < 0)].sum())}
    for failure, seconds in zip(found.interruptions, owners[1:], strict=True):
        by_class[failure.cls] = by_class.get(failure.cls, 0.0) + float(seconds)
    held = _Held(view.events, view.log, found.end)
    failures = sum(each.restarted for each in found.interruptions)
    return Goodput(
        begin,
        end,
        {name: float(s) for name, s in zip(CAUSES, sums, strict=True)},
        {name: s for name, s in by_class.items() if s > 0},
        sorted(found.interruptions, key=lambda each: each.time),
        mtbf(failures, held.trained_s),
        mtbf(failures, held.trained_node_s),
        held.idle if runs else [],
        held.idle_s,
        straggling,
        notes,
    )


class _Held:
    """How long nodes were held with and without ranks, from the events of a run that ended, or is seen, at `end`."""

    def __init__(self, events: Sequence[Event], log: StepLog, end: float) -> None:
        self.idle_s: dict[int, float] = {}
        self.trained_s = self.trained_node_s = 0.0  # from the first generation of each start to its end
        self._present: set[int] = set()
        self._busy: set[int] = set()
        self._at = -math.inf
        for event in events:
            if not math.isfinite(event.time):
                continue
            if event.kind == "run_started" and self._busy:  # no end of the start before was recorded
                times = [t for t, g in zip(log.times, log.generations, strict=True) if g < event.generation]
                self._to(max(times, default=self._at))
                self._present, self._busy = set(), set()
            self._to(event.time)
            self._add_event(event)
        self._to(end)

    @property
    def idle(self) -> list[int]:
        return sorted(self._present - self._busy)

    def _to(self, time: float) -> None:
        elapsed_s, self._at = time - self._at, max(time, self._at)
        if not 0 < elapsed_s < math.inf:
            return
        for node in self._present - self._busy:
            self.idle_s[node] = self.idle_s.get(node, 0.0) + elapsed_s
        if self._busy:
            self.trained_s += elapsed_s
            self.trained_node_s += elapsed_s * len(self._busy)

    def _add_event(self, event: Event) -> None:
        started, node = nodes_of(event), event.node
        if started is not None:
            self._busy = set(started)
            self._present |= self._busy
        elif event.kind in ("node_joined", "agent_started") and node is not None:
            self._present.add(node)
        elif event.kind in ("node_lost", "node_evicted", "node_left") and node is not None:
            self._present.discard(node)
            self._busy.discard(node)
        elif event.kind in ENDS:
            self._present, self._busy = set(), set()
