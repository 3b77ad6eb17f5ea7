"""A callback: the losses as a table for a spreadsheet. `callbacks = ["losses"]` in [train]."""

from __future__ import annotations

from pathlib import Path

from seatrial.record.metrics import MetricsRecord


class Losses:
    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / "reports" / "losses.csv"

    def __call__(self, record: MetricsRecord) -> None:
        with self._path.open("a") as file:
            file.write(f"{record.generation},{record.step},{record.loss}\n")
