"""A tracker: one line of text for each step and event, as one would send them to a chat. `trackers = ["lines"]` in [watch]."""

from __future__ import annotations

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.watch.trackers.tracker import TrackedRun


class Lines:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or run.name
        self._file = (run.path / "reports" / "lines.txt").open("a", buffering=1)

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        self._file.write(f"step {record.step}: loss {values['train/loss']:.4f}\n")

    def log_event(self, event: Event, step: int, count: int) -> None:
        self._file.write(f"after step {step}: {event.message}\n")

    def flush(self) -> None:
        self._file.flush()

    def end(self, state: State) -> None:
        self._file.write(f"{self.id} {state}\n")
        self._file.close()
