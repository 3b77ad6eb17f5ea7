"""The validation loss: of the same samples in the same order, in every layout and in every run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from seatrial.data.loader import NO_TARGET, BatchLoader
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record.messages import Leaving
from seatrial.record.stages import VALIDATION
from seatrial.train.meter import OwnWorkTimer


@dataclass(frozen=True)
class ValidationSet:
    """The first `samples` of `loader`, whose batches are as large as those of training after a batch ramp."""

    loader: BatchLoader
    samples: int

    @property
    def batches(self) -> int:
        """Number of batches; the last one may be partly empty."""
        return -(-self.samples // self.loader.batches.largest)


@dataclass(frozen=True)
class Measured:
    """The result of a validation, equal in all ranks."""

    loss: float | None  # mean over the targets that count, in nats (0 if none does); None if interrupted
    seconds: float
    leaving: Leaving | None  # a leave request to at least one rank meanwhile


class Validation:
    """Measures the validation loss during training; model and optimizer do not change."""

    def __init__(
        self, job: Job, data: ValidationSet, model: ParallelModel, clock: OwnWorkTimer | None
    ) -> None:
        """`clock` does not count the time of a validation."""
        self._every, self._last = job.train.validate_every_steps or job.train.steps, job.train.steps
        self._data, self._model, self._clock = data, model, clock

    def due(self, step: int) -> bool:
        """Whether a validation follows the update of `step`."""
        return step > 0 and (step % self._every == 0 or step == self._last)

    def measure(
        self, leave_request: Callable[[], Leaving | None], progress: Callable[[int], None]
    ) -> Measured:
        """Validate; all ranks call this. `progress` gets the number of the batch that all ranks begin, from 1.

        On a `leave_request` to any rank, all stop after the same batch.
        """
        begin = time.perf_counter()
        paused = nullcontext() if self._clock is None else self._clock.paused()
        with self._model.clock.only(VALIDATION), paused:
            total, counted, leaving = 0.0, 0.0, None
            for number in range(1, self._data.batches + 1):
                progress(number)
                loss, targets, leaving = self._batch(number, leave_request())
                total += loss
                counted += targets
                if leaving is not None:
                    break
        loss_or_none = None if leaving is not None else total / max(1.0, counted)
        return Measured(loss_or_none, time.perf_counter() - begin, leaving)

    def _batch(self, number: int, leave_request: Leaving | None) -> tuple[float, float, Leaving | None]:
        """(sum of the losses of batch `number` over all ranks, number of its targets, a leave request to any of them)."""
        mesh, loader = self._model.mesh, self._data.loader
        size = loader.batches.largest
        share = size // mesh.layout.data_parallel
        first = mesh.data_rank * share
        batch = loader.batch(number, first, share)
        # Every rank computes whole batches, as in training; targets beyond the last sample are masked.
        used = self._data.samples - (number - 1) * size - first
        batch.target_BT[max(0, used) :] = NO_TARGET
        batch = batch.to(mesh.device)
        values = torch.tensor(
            [0.0, 0.0, leave_request == "yielded", leave_request == "preempted"], dtype=torch.float64
        )
        values = values.to(mesh.device)
        values[0] = self._model.validation_loss(*batch)
        values[1] = (batch.target_BT != NO_TARGET).sum()
        loss, targets, yielded, preempted = mesh.sum_over_ranks(values).tolist()
        # Every rank of a data-parallel rank's tensor, context and pipeline groups has counted the same ones.
        targets /= mesh.layout.world_size // mesh.layout.data_parallel
        return loss, targets, "preempted" if preempted else "yielded" if yielded else None
