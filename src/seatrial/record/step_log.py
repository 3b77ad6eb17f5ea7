"""When each step ended and how long it took, in file order, with the steps that were done again."""

from __future__ import annotations

from array import array

from seatrial.record.metrics import MetricsRecord


class StepLog:
    """All records of metrics.jsonl; unlike `History` it keeps those whose steps were done again later."""

    def __init__(self) -> None:
        self.steps, self.generations = array("q"), array("q")
        self.times, self.seconds = array("d"), array("d")  # end of the step, unix seconds; its duration

    def take(self, record: MetricsRecord) -> None:
        """Take the next record of metrics.jsonl."""
        self.steps.append(record.step)
        self.generations.append(record.generation)
        self.times.append(record.time)
        self.seconds.append(record.step_time_s)
