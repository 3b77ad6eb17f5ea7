"""A metric: the perplexity of the step's batch. `metrics = ["perplexity"]` in [train]."""

from __future__ import annotations

import math
from pathlib import Path

from seatrial.record.metrics import MetricsRecord


class Perplexity:
    def __init__(self, run_folder: Path) -> None:
        pass

    def __call__(self, record: MetricsRecord) -> float:
        return math.exp(record.loss)
