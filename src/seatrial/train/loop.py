"""The training loop of one rank: batches, steps, records, checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any

from seatrial.base.errors import RunFailed
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.write import PeerSaveFailed, SaveFailed, remove_old
from seatrial.data.loader import BatchLoader
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsWriter
from seatrial.train import state
from seatrial.train.meter import Meter, memory_bytes
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.schedule import learning_rate
from seatrial.train.step import StepResult, train_step


@dataclass
class _Started:
    """A step that the device may still be working on."""

    step: int
    lr: float
    data_wait: float
    result: StepResult


class Loop:
    """Trains from one step to the last. Rank 0 writes metrics, ledger and events; all ranks write checkpoints."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        model: ParallelModel,
        optimizer: ShardedAdamW,
        loader: BatchLoader,
    ) -> None:
        self.job = job
        self.folder = folder
        self.generation = generation
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        mesh = model.mesh
        self._writes = mesh.rank == 0
        self._meter = Meter(job, mesh.device, generation)
        self._metrics = MetricsWriter(folder) if self._writes else None
        self._ledger = LedgerWriter(folder) if self._writes else None
        # On a GPU the host runs one step ahead: reading a step's loss at once would stop the device after each.
        self._ahead = 1 if mesh.device.type == "cuda" else 0
        self._started: list[_Started] = []
        self._clock = 0.0

    def run(self, first_step: int) -> None:
        """Train the steps `first_step` to the job's last one."""
        steps = self.job.train.steps
        every = self.job.checkpoint.every_steps
        convention, numbers = self._meter.convention()
        self._event("device", convention, data=numbers)
        self._clock = time.perf_counter()
        for step in range(first_step, steps + 1):
            self.train_one(step)
            if step % every == 0 or step == steps:
                self._read_results(leave=0)
                self._save(step)
                self._clock = time.perf_counter()  # the save is no part of the next step's time
        self._read_results(leave=0)
        for writer in (self._metrics, self._ledger):
            if writer is not None:
                writer.close()

    def train_one(self, step: int) -> None:
        """Train one step and record it, or on a GPU the one before it."""
        self._start(step)
        self._read_results(leave=self._ahead)

    def _start(self, step: int) -> None:
        mesh, train = self.model.mesh, self.job.train
        begin = time.perf_counter()
        share = train.global_batch // mesh.layout.data_parallel
        ids_BT, target_BT = self.loader.batch(step, mesh.data_rank * share, share)
        if mesh.device.type == "cuda":
            ids_BT = ids_BT.pin_memory().to(mesh.device, non_blocking=True)
            target_BT = target_BT.pin_memory().to(mesh.device, non_blocking=True)
        data_wait = time.perf_counter() - begin
        lr = learning_rate(step, train.steps, self.job.optimizer)
        result = train_step(
            self.model,
            self.optimizer,
            ids_BT,
            target_BT,
            lr=lr,
            clip_norm=self.job.optimizer.clip_norm or None,
            memory_bytes=lambda: memory_bytes(mesh.device),
        )
        self._started.append(_Started(step, lr, data_wait, result))

    def _read_results(self, *, leave: int) -> None:
        while len(self._started) > leave:
            done = self._started.pop(0)
            loss, norm, memory = done.result.read()
            now = time.perf_counter()
            seconds, self._clock = now - self._clock, now
            if not (math.isfinite(loss) and math.isfinite(norm)):
                # Every rank has the same numbers and stops here; nothing of this step has been saved.
                raise RunFailed(
                    f"the loss is {loss} and the gradient norm {norm} at step {done.step}",
                    hint="lower optimizer.lr, or raise optimizer.warmup_steps, and start over with --fresh: "
                    "a resumed run keeps its optimizer settings",
                )
            if self._metrics is not None and self._ledger is not None:
                first, end = self.loader.samples(done.step)
                self._ledger.write(LedgerRecord(done.step, first, end, self.generation))
                self._metrics.write(
                    self._meter.record(
                        done.step,
                        loss=loss,
                        grad_norm=norm,
                        lr=done.lr,
                        seconds=seconds,
                        data_wait=done.data_wait,
                        memory=memory,
                    )
                )

    def _save(self, step: int) -> None:
        begin = time.perf_counter()
        tokens = step * self.job.train.global_batch * self.job.train.sequence_length
        progress = Progress(step, tokens, self.loader.samples(step)[1], self.generation)
        for writer in (self._metrics, self._ledger):
            if writer is not None:
                writer.sync()  # a checkpoint that survives a power loss must not outlive the record of its steps
        try:
            saved = state.save(self.job, self.model, self.optimizer, self.folder.checkpoints, progress)
        except SaveFailed as error:
            if not self._writes and not isinstance(error, PeerSaveFailed):
                self._tell_own(step, error)
            if step == self.job.train.steps:
                raise  # the end of the run: there is no later chance
            self._event(
                "checkpoint_failed",
                f"the checkpoint of step {step} could not be written: {error.message}; training goes on",
                severity="error",
                data={"step": step},
            )
            return
        if self._writes:
            size = sum(p.stat().st_size for p in saved.iterdir())
            seconds = time.perf_counter() - begin
            self._event(
                "checkpoint_saved",
                f"checkpoint of step {step} saved in {seconds:.2f} s",
                data={"step": step, "folder": str(saved), "bytes": size, "seconds": seconds},
            )
            for old in remove_old(self.folder.checkpoints, self.job.checkpoint.keep):
                self._event(
                    "checkpoint_removed",
                    f"removed {old.name}: the newest {self.job.checkpoint.keep} are kept",
                )

    def _tell_own(self, step: int, error: SaveFailed) -> None:
        # A full disk may refuse this line too; the failure itself is told by rank 0.
        with contextlib.suppress(OSError):
            events.append(
                self.folder,
                "checkpoint_failed",
                f"rank {self.model.mesh.rank} could not write its part of step {step}: {error.message}",
                severity="error",
                generation=self.generation,
                rank=self.model.mesh.rank,
                data={"step": step},
            )

    def _event(
        self,
        kind: str,
        message: str,
        *,
        severity: events.Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None:
        if self._writes:
            events.append(
                self.folder, kind, message, severity=severity, generation=self.generation, rank=0, data=data
            )
