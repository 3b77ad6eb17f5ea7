"""When each step ended and how long it took, in file order, with the steps that were done again."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from seatrial.record.metrics import MetricsRecord

if TYPE_CHECKING:
    from seatrial.record.bulk import Columns


class StepLog:
    """All records of metrics.jsonl; unlike `History` it keeps records of steps that were redone later."""

    def __init__(self) -> None:
        self.steps, self.generations = array("q"), array("q")
        self.times, self.seconds = array("d"), array("d")  # end of the step, unix seconds; its duration
        self.validation = array("d")  # seconds of the validation after it; NaN: none

    def add(self, record: MetricsRecord) -> None:
        """Add the next record of metrics.jsonl."""
        self.steps.append(record.step)
        self.generations.append(record.generation)
        self.times.append(record.time)
        self.seconds.append(record.step_time_s)
        self.validation.append(math.nan if record.validation_time_s is None else record.validation_time_s)

    def add_columns(self, found: Columns) -> None:
        """Add many records."""
        self.steps.frombytes(found["step"].tobytes())
        self.generations.frombytes(found["generation"].tobytes())
        self.times.frombytes(found["time"].tobytes())
        self.seconds.frombytes(found["step_time_s"].tobytes())
        self.validation.frombytes(found["validation_time_s"].tobytes())
