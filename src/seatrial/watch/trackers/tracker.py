"""The interface of tracker adapters: a class with the methods of `Tracker`, constructed with a `TrackedRun`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State


@dataclass(frozen=True)
class TrackedRun:
    """The run that is pushed."""

    name: str
    path: Path  # its folder
    config: dict[str, Any]  # the job file's keys, as "section.key"
    id: str | None  # the tracker's ID from an earlier push; None: first push
    step: int  # last step pushed


class Tracker(Protocol):
    """A connection to a tracker, in its own process: it may block, fail or print.

    After a recovery, redone steps are logged again, so `step` can decrease.
    """

    @property
    def id(self) -> str:
        """The tracker's ID of the run, to resume after a restart."""
        ...

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        """Push a step: `values` by metric name."""
        ...

    def log_event(self, event: Event, step: int, count: int) -> None:
        """Push an event that happened after `step`, the `count`th of its kind."""
        ...

    def flush(self) -> None:
        """Return once everything pushed would survive a crash of this process."""
        ...

    def end(self, state: State) -> None:
        """Close the run."""
        ...


def values_of(record: MetricsRecord) -> dict[str, float]:
    """The values of a step by metric name, the same for all trackers; unknown values are left out."""
    found = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/router_aux_loss": record.router_aux_loss,
        "train/expert_load_max": record.expert_load_max,
        "train/expert_load_min": record.expert_load_min,
        "train/idle_experts": record.idle_experts,
        "train/loss_tokens": record.loss_tokens,
        "train/lr": record.lr,
        "train/tokens": record.tokens,
        "validation/loss": record.validation_loss,
        "validation/time_s": record.validation_time_s,
        "speed/step_time_s": record.step_time_s,
        "speed/data_wait_s": record.data_wait_s,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/tokens_per_s_per_gpu": record.tokens_per_s_per_gpu,
        "speed/mfu": record.mfu,
        "memory/bytes": record.memory_bytes,
        "run/generation": record.generation,
        **{f"metrics/{name}": value for name, value in (record.extra or {}).items()},
    }
    return {name: value for name, value in found.items() if value is not None}
