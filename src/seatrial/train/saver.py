"""Checkpoints on their way to the disk, and what is told of them."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

from seatrial.checkpoint.manifest import Progress, named, step_of
from seatrial.checkpoint.read import set_aside
from seatrial.checkpoint.write import PeerSaveFailed, SaveFailed, remove_old
from seatrial.data.loader import BatchLoader
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.train import state
from seatrial.train.optimizer import ShardedAdamW


class Event(Protocol):
    """Appends an event, in one rank."""

    def __call__(
        self,
        kind: str,
        message: str,
        *,
        severity: events.Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None: ...


class Saver:
    """Saves the state of one leg; all ranks call it at the same steps."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        model: ParallelModel,
        optimizer: ShardedAdamW,
        loader: BatchLoader,
        event: Event,
    ) -> None:
        self._job, self._folder, self._generation = job, folder, generation
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._event = event
        self._writes = model.mesh.rank == 0

    def save(self, step: int, *, must: bool) -> None:
        """Write the checkpoint of `step`. A failure is told, and with `must` raised as SaveFailed in every rank."""
        job = self._job
        begin = time.perf_counter()
        tokens = step * job.train.global_batch * job.train.sequence_length
        progress = Progress(step, tokens, self._loader.samples(step)[1], self._generation)
        try:
            saved = state.save(job, self._model, self._optimizer, self._folder.checkpoints, progress)
        except SaveFailed as error:
            if not self._writes and not isinstance(error, PeerSaveFailed):
                self._tell_own(step, error)
            if must:
                raise  # there is no later chance
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
            for old in remove_old(self._folder.checkpoints, job.checkpoint.keep):
                self._event(
                    "checkpoint_removed",
                    f"removed {old.name}: the newest {job.checkpoint.keep} are kept",
                )

    def distrust(self, step: int, why: str) -> None:
        """Set aside the checkpoints of later steps than `step`: whatever went wrong may be in them. Rank 0 does it."""
        if not self._writes:
            return
        for path in named(self._folder.checkpoints):
            if (step_of(path) or 0) <= step:
                return
            try:
                aside = set_aside(path)
            except OSError as error:
                message = f"{path.name} must not be used ({why}), and could not be set aside: {error}"
                self._event("checkpoint_failed", message, severity="error", data={"step": step_of(path)})
                continue
            self._event(
                "checkpoint_set_aside",
                f"{path.name} is set aside as {aside.name}: {why}",
                severity="warning",
                data={"step": step_of(path)},
            )

    def _tell_own(self, step: int, error: SaveFailed) -> None:
        # A full disk may refuse this line too; the failure itself is told by rank 0.
        with contextlib.suppress(OSError):
            events.append(
                self._folder,
                "checkpoint_failed",
                f"rank {self._model.mesh.rank} could not write its part of step {step}: {error.message}",
                severity="error",
                generation=self._generation,
                rank=self._model.mesh.rank,
                data={"step": step},
            )
