"""Weights & Biases: one run. Mode, project, entity and key from its own environment variables (WANDB_MODE=offline, ...)."""

from __future__ import annotations

import os
import uuid

import wandb

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.watch.trackers.tracker import TrackedRun

_X = "step"


class WeightsAndBiases:
    """Its history is append-only: a redone step is a new row, with a higher run/generation if a later generation redid it."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or uuid.uuid4().hex
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "seatrial"),
            name=run.name,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", run.path),
            config=run.config,
            # No system metrics: this process does not train.
            settings=wandb.Settings(console="off", x_disable_stats=True, disable_code=True, disable_git=True),
        )
        self._run.define_metric("*", step_metric=_X)

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        self._run.log({_X: record.step, "_timestamp": record.time, **values})

    def log_event(self, event: Event, step: int, count: int) -> None:
        text = f"{event.severity}: {event.message}"
        row = {"event": event.kind, "event_text": text, f"events/{event.kind}": count}
        self._run.log({_X: step, "_timestamp": event.time, **row})

    def flush(self) -> None:
        pass  # wandb's own service process writes it, even if this one crashes

    def end(self, state: State) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
