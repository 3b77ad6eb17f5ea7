"""The trackers that a job file can name: built in, or of other packages."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.base.registry import Registry


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker and what it needs. Imported for a job file, so it imports nothing else."""

    path: str  # "module:Class" of a `watch.trackers.tracker.Tracker`
    needs: str  # the module without which it cannot run
    install: str  # the command that installs it


def _own(module: str, name: str) -> TrackerEntry:
    return TrackerEntry(f"seatrial.watch.trackers.{module}", name, f'pip install "seatrial[{name}]"')


TRACKERS: Registry[TrackerEntry] = Registry(
    "tracker",
    "seatrial.trackers",
    {
        "tensorboard": _own("tensorboard:TensorBoard", "tensorboard"),
        "wandb": _own("wandb:WeightsAndBiases", "wandb"),
        "mlflow": _own("mlflow:MLflow", "mlflow"),
    },
    of=TrackerEntry,
)
