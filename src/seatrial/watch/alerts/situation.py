"""What the rules look at: a run at one moment, from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.saved import CheckpointInfo
from seatrial.record.telemetry import Sample


@dataclass(frozen=True)
class Situation:
    """A run now. `events` and `steps` are the recent ones, oldest first."""

    now: float  # unix seconds
    run: str  # the run folder, as a command takes it
    job: str  # its job file
    started: float  # unix seconds: when this start of the run began
    events: Sequence[Event]
    steps: Sequence[MetricsRecord]
    samples: Mapping[int, Sample] = field(default_factory=dict)  # node -> its newest telemetry
    grown: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # node -> counter -> in 10 minutes
    training: Sequence[int] = ()  # nodes with ranks
    spares: Sequence[int] = ()  # nodes that have joined and may get ranks
    idle: Mapping[int, str] = field(default_factory=dict)  # nodes that are held and cannot get ranks -> why
    untested: Sequence[int] = ()  # nodes that came back after a repair, and were not tested since
    wanted_spares: int = 0
    wanted_nodes: int = 0
    checkpoint: CheckpointInfo | None = None  # the newest complete one
    checkpoint_steps: int | None = None  # steps between two; None: not known
    total_steps: int | None = None  # the job's

    def recent(self, kinds: Sequence[str], seconds: float) -> list[Event]:
        """The events of these kinds in the last so many seconds."""
        return [e for e in self.events if e.kind in kinds and e.time > self.now - seconds]
