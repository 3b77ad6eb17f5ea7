"""Records a torch.profiler trace of a few steps of some ranks, if the job requests it (`train.profile_*`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from seatrial.base.complain import complain
from seatrial.hardware.accelerator import is_accelerator
from seatrial.job import Job
from seatrial.record.folder import RunFolder

# A trace is held in memory and written as text: about 400 bytes an event, 20 times less once compressed.
MOST_EVENTS = 2_000_000


class Trace:
    """The trace of one rank in one generation; a no-op if the job does not request one of this rank.

    A trace that cannot be recorded or written is reported, and training continues.
    """

    def __init__(self, job: Job, folder: RunFolder, generation: int, rank: int, device: torch.device) -> None:
        train = job.train
        self._path = folder.trace(generation, rank)
        self._activities = [ProfilerActivity.CPU]
        if is_accelerator(device):
            self._activities.append(ProfilerActivity.CUDA)
        self._first = self._last = 0
        if rank in (train.profile_ranks or ()):
            self._first = train.profile_first_step
            self._last = self._first + train.profile_steps - 1
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the body if this step was requested; the trace is written after the last such step."""
        if number == self._first:
            self._begin()
        if self._profile is None:
            yield
            return
        with record_function(f"step {number}"):
            yield
        if number >= self._last:
            self._finish()

    def close(self) -> None:
        """Stop a running trace, and write what it has recorded."""
        if self._profile is not None:
            self._finish()

    def _begin(self) -> None:
        try:
            self._profile = profile(activities=self._activities, record_shapes=True)
            self._profile.start()
        except RuntimeError as error:  # another profiler is active in this process
            self._failed(error)

    def _finish(self) -> None:
        found, self._profile = self._profile, None
        assert found is not None
        self._first = 0  # once in a generation
        try:
            found.stop()
            results = found.profiler.kineto_results if found.profiler is not None else None
            events = len(results.events()) if results is not None else 0
            if events > MOST_EVENTS:
                complain(f"the trace has {events:,} events, more than {MOST_EVENTS:,}: it is not written")
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_name(f".{self._path.name}")
            found.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self._path)
        except (OSError, RuntimeError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._profile = None
        complain(f"no trace of this rank is recorded: {error}")
