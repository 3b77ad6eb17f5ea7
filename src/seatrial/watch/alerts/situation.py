"""The input of the alert rules: a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.base.batches import BatchSizes
from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.saved import CheckpointInfo
from seatrial.record.telemetry import Sample


@dataclass(frozen=True)
class Situation:
    """A run at `now`. `events` and `steps` are the recent ones, oldest first."""

    now: float  # unix seconds
    run: str  # the run folder, quoted for a command
    job: str  # its job file
    started: float  # unix seconds: when this start of the run began
    events: Sequence[Event]
    steps: Sequence[MetricsRecord]
    samples: Mapping[int, Sample] = field(default_factory=dict)  # node -> latest telemetry
    # node -> counter -> growth in 10 minutes.
    grown: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    training: Sequence[int] = ()  # nodes with ranks
    spares: Sequence[int] = ()  # nodes that have joined and may get ranks
    idle: Mapping[int, str] = field(default_factory=dict)  # held nodes that cannot get ranks -> reason
    untested: Sequence[int] = ()  # nodes that returned after a repair without a test
    wanted_spares: int = 0
    wanted_nodes: int = 0
    checkpoint: CheckpointInfo | None = None  # latest complete one
    checkpoint_steps: int | None = None  # interval in steps; None: unknown
    total_steps: int | None = None  # the job's
    batches: BatchSizes = field(default_factory=lambda: BatchSizes.of(1))

    def recent(self, kinds: Sequence[str], seconds: float) -> list[Event]:
        """Events of these kinds within the last `seconds`."""
        return [e for e in self.events if e.kind in kinds and e.time > self.now - seconds]
