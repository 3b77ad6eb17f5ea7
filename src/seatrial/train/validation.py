"""The loss on the validation data: the same samples in the same order, in every layout and in every run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from seatrial.data.loader import BatchLoader
from seatrial.hardware.accelerator import is_accelerator
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.loss import NO_TARGET
from seatrial.record.messages import Leaving
from seatrial.record.stages import VALIDATION
from seatrial.train.meter import OwnTime


@dataclass(frozen=True)
class ValidationSet:
    """The first `samples` of `loader`, whose batches are as large as those of training."""

    loader: BatchLoader
    samples: int

    @property
    def batches(self) -> int:
        """The last one may be partly empty."""
        return -(-self.samples // self.loader.global_batch)


@dataclass(frozen=True)
class Measured:
    """The result of a validation, equal in all ranks."""

    loss: float | None  # mean over the tokens, in nats; None: it was left before its end
    seconds: float
    leaving: Leaving | None  # request to at least one rank in the meantime


class Validation:
    """Measures it with a model that is being trained, of which nothing changes."""

    def __init__(self, job: Job, data: ValidationSet, model: ParallelModel, clock: OwnTime | None) -> None:
        """`clock` does not count the time of a validation."""
        self._every, self._last = job.train.validate_every_steps or job.train.steps, job.train.steps
        self._data, self._model, self._clock = data, model, clock

    def due(self, step: int) -> bool:
        """Whether it is measured after the update of `step`."""
        return step > 0 and (step % self._every == 0 or step == self._last)

    def measure(self, wants: Callable[[], Leaving | None], progress: Callable[[int], None]) -> Measured:
        """Measure it; all ranks call this. `progress` gets the number of batches that all ranks have begun, from 1.

        If a rank `wants` to leave, all stop after the same batch.
        """
        begin = time.perf_counter()
        paused = nullcontext() if self._clock is None else self._clock.paused()
        with self._model.clock.only(VALIDATION), paused:
            total, leaving = 0.0, None
            for number in range(1, self._data.batches + 1):
                progress(number)
                loss, leaving = self._batch(number, wants())
                total += loss
                if leaving is not None:
                    break
        tokens = self._data.samples * self._data.loader.sequence_length
        return Measured(None if leaving is not None else total / tokens, time.perf_counter() - begin, leaving)

    def _batch(self, number: int, wants: Leaving | None) -> tuple[float, Leaving | None]:
        """(sum of the losses of batch `number` over all ranks, whether one wants to leave)."""
        mesh, loader = self._model.mesh, self._data.loader
        share = loader.global_batch // mesh.layout.data_parallel
        first = mesh.data_rank * share
        batch = loader.batch(number, first, share)
        # Every rank computes whole batches, as in training: what is beyond the last sample does not count.
        used = self._data.samples - (number - 1) * loader.global_batch - first
        batch.target_BT[max(0, used) :] = NO_TARGET
        if is_accelerator(mesh.device):
            batch = batch.to(mesh.device)
        values = torch.tensor([0.0, wants == "yielded", wants == "preempted"], dtype=torch.float64)
        values = values.to(mesh.device)
        values[0] = self._model.validation_loss(*batch)
        loss, yielded, preempted = mesh.sum_over_ranks(values).tolist()
        return loss, "preempted" if preempted else "yielded" if yielded else None
