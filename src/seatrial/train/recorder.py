"""Rank 0's records of each step, each written once: the ledger line before anything depends on it, then the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from seatrial.data.loader import BatchLoader
from seatrial.job import Job
from seatrial.job.callbacks import CALLBACKS, METRICS
from seatrial.parallel.mesh import Mesh
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.recent import recent_ledger, recent_metrics, skipped_steps
from seatrial.train.callbacks import Callbacks
from seatrial.train.health.guard import WINDOW, Guard
from seatrial.train.meter import Meter
from seatrial.train.records import Records
from seatrial.train.schedule import learning_rate
from seatrial.train.step import StepValues, vector_length

LOOK_BACK = 64  # ledger lines among which the last steps are found: a rollback writes some twice


@dataclass(frozen=True)
class SummedStep:
    """A step whose summed vector this rank has: enough to write its records in place of rank 0."""

    generation: int
    step: int
    values: StepValues
    seconds: float
    data_wait: float
    skipped: bool = False

    @property
    def norm_squared(self) -> float:
        return self.values.norm_squared

    def as_row(self) -> list[float]:
        """The values as numbers, for a broadcast."""
        own = [float(self.generation), float(self.step), self.seconds, self.data_wait, float(self.skipped)]
        return own + list(self.values.vector)

    @classmethod
    def from_row(cls, row: Sequence[float]) -> SummedStep:
        generation, step, seconds, data_wait, skipped = row[:5]
        return cls(int(generation), int(step), StepValues(tuple(row[5:])), seconds, data_wait, bool(skipped))

    @staticmethod
    def width(world_size: int) -> int:
        """Numbers in a row."""
        return 5 + vector_length(world_size)


class Recorder:
    """Metrics and ledger of one generation; only rank 0 writes, on other ranks calls are no-ops."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        records: Records,
        loader: BatchLoader,
        meter: Meter,
        *,
        writes: bool,
    ) -> None:
        self._job = job
        self._folder = folder
        self._records = records
        self._loader = loader
        self._meter = meter
        self._metrics = MetricsWriter(folder) if writes else None
        self._ledger = LedgerWriter(folder) if writes else None
        made = partial(Callbacks, job=job, folder=folder, records=records)
        self._extra = made(METRICS, job.train.metrics or ()) if writes else None
        self._callbacks = made(CALLBACKS, job.train.callbacks or ()) if writes else None
        self._highest = 0  # step in the ledger, of this generation
        self._held: MetricsRecord | None = None

    def step(self, known: SummedStep, *, hold: bool = False) -> None:
        """Record a step. One replayed after a rollback keeps its ledger line and gets new metrics.

        `hold`: its metrics wait for `release`.
        """
        # A step that was trained and, after a rollback, skipped gets a second line: readers use the last.
        if known.step > self._highest or known.skipped:
            self._write_ledger(known)
            self._highest = max(self._highest, known.step)
        self._write_metrics(known, hold=hold)

    def hold_again(self, step: int) -> bool:
        """Hold the metrics of `step`, of an earlier generation, if they lack a validation loss; returns whether they do."""
        recent = recent_metrics(self._folder, 1) if self._metrics is not None else []
        lacking = [r for r in recent if r.step == step and r.validation_loss is None]
        self._held = lacking[0] if lacking else None
        return bool(lacking)

    def release(self, validation_loss: float | None = None, validation_time_s: float | None = None) -> None:
        """Write the held metrics, with these values."""
        held, self._held = self._held, None
        if held is None or self._metrics is None or self._callbacks is None:
            return
        if validation_loss is not None:
            held = replace(held, validation_loss=validation_loss, validation_time_s=validation_time_s)
        self._metrics.write(held)
        self._callbacks.step(held)

    def once(self, known: SummedStep) -> None:
        """Record a step of an earlier generation if rank 0 died before recording it."""
        if self._ledger is None:
            return
        ledger = recent_ledger(self._folder, LOOK_BACK)
        if not any(r.step == known.step and r.generation == known.generation for r in ledger):
            self._write_ledger(known)
        metrics = recent_metrics(self._folder, LOOK_BACK)
        if not any(r.step == known.step and r.generation == known.generation for r in metrics):
            self._write_metrics(known)

    def sync(self) -> None:
        """fsync the records: a checkpoint must not outlive the record of its steps and of skipped ones."""
        for writer in (self._metrics, self._ledger):
            if writer is not None:
                writer.sync()
        if self._ledger is not None:
            self._records.settle()

    def close(self) -> None:
        self.release()
        for writer in (self._metrics, self._ledger):
            if writer is not None:
                writer.close()

    def _write_ledger(self, known: SummedStep) -> None:
        if self._ledger is not None:
            first, end = self._loader.samples(known.step)
            self._ledger.write(LedgerRecord(known.step, first, end, known.generation, known.skipped))

    def _write_metrics(self, known: SummedStep, *, hold: bool = False) -> None:
        if self._extra is None or known.skipped:
            return  # a skipped step has no values
        values = known.values
        record = self._meter.record(
            known.step,
            generation=known.generation,
            loss=values.loss,
            grad_norm=values.grad_norm,
            lr=learning_rate(known.step, self._job.train.steps, self._job.optimizer),
            seconds=known.seconds,
            data_wait=known.data_wait,
            memory=max(values.memory_bytes),
        )
        if self._job.architecture.num_experts:
            largest, smallest, idle = values.expert_load
            record = replace(
                record,
                router_aux_loss=values.balance_loss,
                expert_load_max=largest,
                expert_load_min=smallest,
                idle_experts=idle,
            )
        if self._loader.masked:
            record = replace(record, loss_tokens=values.counted)
        if extra := self._extra.values(record):
            record = replace(record, extra=extra)
        self._held = record
        if not hold:
            self.release()


def make_guard(job: Job, folder: RunFolder, mesh: Mesh, before: int) -> Guard:
    """A guard with rank 0's history before step `before`, so that all ranks decide alike. All ranks call it."""
    window, width = WINDOW, max(WINDOW, job.resilience.max_skipped_steps)
    table = torch.zeros(width, 4, dtype=torch.float64)
    if mesh.rank == 0:
        for row, record in enumerate(recent_metrics(folder, window)):
            if record.step < before:
                table[row, :3] = torch.tensor(
                    [record.step, record.loss, record.grad_norm], dtype=torch.float64
                )
        skipped = skipped_steps(folder)[-width:]
        table[: len(skipped), 3] = torch.tensor(skipped, dtype=torch.float64)
    rows = mesh.sum_over_ranks(table.to(mesh.device)).tolist()
    recent = {int(step): (loss, norm) for step, loss, norm, _ in rows if step}
    skipped_before = {int(row[3]): "it was skipped before" for row in rows if row[3]}
    return Guard(job.resilience, skipped=skipped_before, recent=recent)
