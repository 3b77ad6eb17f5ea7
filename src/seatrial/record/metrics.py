"""metrics.jsonl: the metrics of each step, written by one process of the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import LineWriter, Problem, read_numbered
from seatrial.record.typed import decode_all

NOUN = "a metrics record"
# Where a step has none.
_LEFT_OUT = (
    "extra",
    "validation_loss",
    "validation_time_s",
    "router_aux_loss",
    "loss_tokens",
    "expert_load_max",
    "expert_load_min",
    "idle_experts",
)


@dataclass(frozen=True)
class MetricsRecord:
    """One optimizer step. Steps count from 1."""

    step: int
    tokens: int  # trained on so far, including this step
    loss: float  # mean over the tokens of the global batch that count, in nats
    grad_norm: float  # global, before clipping
    lr: float
    step_time_s: float
    data_wait_s: float  # the part of step_time_s spent waiting for data
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None  # 0..1; None if the peak of the device is not known
    memory_bytes: int | None  # peak, of the rank with the largest
    time: float  # unix seconds at the end of the step
    generation: int
    extra: dict[str, float] | None = None  # by the name of the metric that another package adds
    validation_loss: float | None = (
        None  # mean over the validation samples, measured after this step's update
    )
    validation_time_s: float | None = None  # what that took; not a part of any step_time_s
    router_aux_loss: float | None = (
        None  # load-balancing loss of experts, without its coefficient; not in `loss`
    )
    loss_tokens: int | None = None  # tokens that counted in `loss`, where some do not
    # Positions sent to an expert, over the mean of its layer's experts: of the one with most, and with least, in any layer.
    expert_load_max: float | None = None
    expert_load_min: float | None = None
    idle_experts: int | None = None  # of all layers, those to which no position was sent


class MetricsWriter:
    """Appends to metrics.jsonl; the caller ensures that it is the only writer."""

    def __init__(self, folder: RunFolder) -> None:
        self._writer = LineWriter(folder.metrics)

    def write(self, record: MetricsRecord) -> None:
        """Append one record. Raises OSError if the write fails."""
        values = {k: v for k, v in vars(record).items() if v is not None or k not in _LEFT_OUT}
        self._writer.write(values)

    def sync(self) -> None:
        """Fsync what was written."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def read_metrics(folder: RunFolder) -> tuple[list[MetricsRecord], list[Problem]]:
    """One record per step, of the last generation that did it, by step; and the lines that are not records."""
    numbered, problems = read_numbered(folder.metrics, NOUN)
    records, wrong = decode_all(MetricsRecord, numbered, file=folder.metrics.name, noun=NOUN)
    last: dict[int, MetricsRecord] = {}
    for record in records:
        known = last.get(record.step)
        if known is None or record.generation >= known.generation:
            last[record.step] = record
    return [last[step] for step in sorted(last)], sorted(problems + wrong, key=lambda p: p.line)


def current_history(records: Iterable[MetricsRecord]) -> list[MetricsRecord]:
    """The steps that led to the run's current state, from `read_metrics`.

    A generation that resumes from step 50 invalidates what earlier ones did after it: until it has redone them, those
    steps are in the file but not part of the run.
    """
    kept: list[MetricsRecord] = []
    newest = 0
    for record in sorted(records, key=lambda r: r.step):
        if record.generation >= newest:
            newest = record.generation
            kept.append(record)
    return kept
